"""Keep control tokens that clients write in messages apart from those that the chat template writes.

A template mixes clients' texts and its own markers in one text, in which `<|im_end|>` of a message looks like
the template's. So before rendering, `shielded` puts a mark into each control token of the clients' texts. The rendered
text is tokenized by `literal_text`, which removes the marks: tokens with a mark are text. Raw prompts, which are not
rendered, are not treated here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagemill_api.text.segments import MAX_TRIED, token_pattern

MARK = "\x7f"
"""The character DEL: templates do not trim it, and JSON does not escape it. Clients' own are doubled."""
_MARKS = re.compile(f"{MARK}({MARK}?)")
_LOOKS_LIKE_A_MARKER = re.compile(r"<\S+>|\[\S+\]|<\|\S+")
_MAX_TOKEN_CHARS = 128


class ControlTokenMarks:
    """The control tokens of a tokenizer: special ones, and others that look like markers, such as `<tool_call>`."""

    def __init__(self, tokenizer_json: Mapping[str, Any]) -> None:
        added = [each for each in tokenizer_json.get("added_tokens") or [] if _can_be_marked(each["content"])]
        special = [each["content"] for each in added if each.get("special")]
        markers = [each["content"] for each in added if _LOOKS_LIKE_A_MARKER.fullmatch(each["content"])]
        self.texts = frozenset([*special, *markers])
        self._special, self._all = _Shield(special), _Shield([*special, *markers])

    def shielded_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages for a template, in which control tokens are marked.

        In texts of users and tools these are all; in those of the assistant and the system, whose texts may contain the
        model's own markers of reasoning and calls, the special ones.
        """
        return [self._message(message) for message in messages]

    def shielded(self, value: Any) -> Any:
        """Return a JSON value, such as tools, in which special tokens are marked."""
        return self._special.value(value)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        shield = self._all if message["role"] in ("user", "tool") else self._special
        return {name: each if name == "role" else shield.value(each) for name, each in message.items()}


class _Shield:
    def __init__(self, texts: Sequence[str]) -> None:
        self._tokens = pattern_of(frozenset(texts))
        self._tokens_in_json = pattern_of(frozenset(map(_in_json, texts)))

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value) if MARK in value or self._tokens.search(value) else value
        if not isinstance(value, dict | list):
            return value
        try:
            whole = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError):
            return value  # rendering refuses it
        return self._within(value) if MARK in whole or self._tokens_in_json.search(whole) else value

    def _within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._within(each) for each in value]
        if isinstance(value, dict):
            return {self._text(key): self._within(each) for key, each in value.items()}
        return value

    def _text(self, text: str) -> str:
        text = text.replace(MARK, 2 * MARK)
        while (marked := self._tokens.sub(lambda found: found[0][0] + MARK + found[0][1:], text)) != text:
            text = marked  # a mark may leave another token beside it
        return text


def without_marks(text: str) -> str:
    """Return the text that clients and template wrote."""
    return _MARKS.sub(r"\1", text)


def pattern_of(texts: frozenset[str]) -> re.Pattern[str]:
    """Return an expression that finds the longest of these texts.

    Of texts that together take long to find, which no real tokenizer has, it finds the longest `MAX_TRIED`.
    """
    found = token_pattern(texts) if texts else re.compile("(?!)")
    if found is not None:
        return found
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)[:MAX_TRIED])))


def _can_be_marked(text: str) -> bool:
    return 1 < len(text) <= _MAX_TOKEN_CHARS and MARK not in text and not text.isspace()


def _in_json(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1]

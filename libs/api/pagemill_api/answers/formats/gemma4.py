"""Gemma 4's format: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:2}<tool_call|>`.

The arguments are JSON with other quotes and bare keys.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pagemill_api.answers.call_syntax import CallSyntax, Schema
from pagemill_api.answers.json_text import ValueScanner, json_of
from pagemill_api.answers.markup import MarkupParser
from pagemill_api.answers.one_by_one import CallArgument, arguments_of, required_first
from pagemill_api.structural_tags import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    SequenceFormat,
    Tag,
)
from pagemill_protocol.errors import show

REASONING = ("<|channel>thought\n", "<channel|>")
_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = "call:"
_FREE = frozenset({"type", "title", "description", "default", "examples", "$defs", "definitions"})
_BARE = re.compile(r"[{}\[\],:]|[^{}\[\],:<\s]+|\s+|<")


def _arguments_of(schema: Schema) -> Format:
    """Return the form `key:value,...` with required arguments first."""
    arguments = arguments_of(schema)
    for each in arguments:
        if not re.fullmatch(r"[\w.-]+", each.name):
            raise ValueError(f"the property {show(each.name)} cannot be a bare key; rename it")
    inner = required_first([(_argument(each), each.required) for each in arguments], ",")
    return SequenceFormat(elements=[ConstString(value="{"), inner, ConstString(value="}")])


def _argument(argument: CallArgument) -> Format:
    """A text of any characters stands between the model's quotes; all other values are JSON."""
    key, schema = argument.name + ":", argument.schema
    if isinstance(schema, dict) and schema.keys() <= _FREE and schema.get("type") == "string":
        return Tag(begin=key + _QUOTE, content=AnyText(), end=_QUOTE)
    return SequenceFormat(elements=[ConstString(value=key), JsonSchema(json_schema=schema)])


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return f"{_QUOTE}{value}{_QUOTE}" if isinstance(value, str) else json_of(value)


SYNTAX = CallSyntax(
    begin=_CALL + "%s",
    end=_END,
    opening=_BEGIN,
    separator=_BEGIN,
    trigger=_BEGIN,
    arguments=_arguments_of,
    write=_written,
)


class Gemma4Parser(MarkupParser):
    """Emits arguments as JSON while they are written: the text between quotes, and bare words once they end."""

    call_markers = (_BEGIN,)

    def _text(self) -> bool:
        text, marker = self._take(_BEGIN)
        self._content(text)
        if marker:
            self._name = ""
            self._state = self._header
        return bool(marker)

    def _header(self) -> bool:
        """Read `call:NAME` up to the arguments; anything else is text."""
        text, marker = self._take("{", _END, releases=False)
        self._name += text
        if not marker:
            return False
        name = self._name.strip()
        if marker != "{" or not name.startswith(_CALL) or name == _CALL or any(map(str.isspace, name)):
            self._content(_BEGIN + self._name)
            self._buffer = marker + self._buffer if marker == "{" else self._buffer
            self._state = self._text
            return True
        self._begin(name.removeprefix(_CALL))
        self._arguments("{")
        self._open, self._word = ["{"], ""
        self._state = self._value
        return True

    def _value(self) -> bool:
        """Read outside of quotes."""
        while self._buffer:
            if _QUOTE.startswith(self._buffer[: len(_QUOTE)]):
                if len(self._buffer) < len(_QUOTE):
                    return False
                self._buffer = self._buffer[len(_QUOTE) :]
                self._arguments('"')
                self._state = self._quoted
                return True
            if self._buffer[0] == '"' and not self._word.strip():
                self._scanner, self._state = ValueScanner(), self._json_text
                return True
            found = _BARE.match(self._buffer)
            assert found is not None, "any character matches"
            if self._step(found[0]):
                return bool(self._buffer)
        return False

    def _step(self, part: str) -> bool:
        """Take a part outside of quotes. Returns whether the arguments end."""
        self._buffer = self._buffer[len(part) :]
        if part not in ("{", "}", "[", "]", ",", ":"):
            self._word += part
            return False
        self._bare_word(part)
        if part in "{[":
            self._open.append(part)
        elif part in "}]":
            self._open.pop()
        self._arguments(", " if part == "," else ": " if part == ":" else part)
        if self._open:
            return False
        self._end()
        self._state = self._behind
        return True

    def _bare_word(self, before: str) -> None:
        """Emit the word before a bracket, comma or colon: a key, or a value that is text unless it is JSON."""
        word, self._word = self._word.strip(), ""
        if not word:
            return
        is_json = before != ":" and _is_scalar(word)
        self._arguments(word if is_json else json_of(word))

    def _json_text(self) -> bool:
        """Read a text in JSON's own quotes, which constrained answers have within lists and objects."""
        end = self._scanner.scan(self._buffer)
        self._arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if self._scanner.done:
            self._state = self._value
        return bool(self._buffer)

    def _quoted(self) -> bool:
        text, marker = self._take(_QUOTE, releases=False)
        self._arguments(json_of(text)[1:-1])
        if marker:
            self._arguments('"')
            self._state = self._value
        return bool(marker)

    def _behind(self) -> bool:
        _, marker = self._take(_END, _BEGIN)
        if marker == _END:
            self._state = self._text
        elif marker:
            self._name = ""
            self._state = self._header
        return bool(marker)


def _is_scalar(word: str) -> bool:
    try:
        json.loads(word)
    except (ValueError, RecursionError):
        return False
    return True

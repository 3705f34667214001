"""Harmony, the format of gpt-oss: messages in channels, `<|channel|>analysis<|message|>...<|end|>`.

Channels contain reasoning, text and calls; a call is a message to `functions.NAME`. The prompt ends with
`<|start|>assistant`, so an answer starts with a header.
"""

from __future__ import annotations

import re

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.json_text import ValueScanner
from pagemill_api.answers.markup import MarkupParser
from pagemill_api.structural_tags import AnyText, Tag

_START, _MESSAGE = "<|start|>", "<|message|>"
_CHANNEL_BEGIN = "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL_BEGIN)
"""The beginning of another message ends one too."""
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER = re.compile(r"\s*to=|.*<\|(?:channel|start|constrain)\||\s*<\|", re.DOTALL)
"""The beginning of a header, as opposed to text."""
REASONING = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>"
SYNTAX = CallSyntax(
    begin="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
    end="",
    text=Tag(begin=_FINAL, content=AnyText(), end=""),
    text_opening=_FINAL,
    single=True,
)


class HarmonyParser(MarkupParser):
    def __init__(self) -> None:
        super().__init__()
        self._header = ""
        self._has_header = False
        self._is_empty = True

    def _text(self) -> bool:
        """Read a header. An answer without any header is text."""
        text, marker = self._take(_MESSAGE)
        self._header += text
        if not marker:
            return False
        header, self._header = self._header, ""
        self._has_header = True
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self.in_reasoning = recipient is None and channel is not None and channel[1] == "analysis"
        self._is_empty = True
        self._state = self._body
        if recipient is not None:
            self._begin(recipient[1])
            self._state = self._call_body
        return True

    def _body(self) -> bool:
        """Read a message up to its end: text, or arguments that are no JSON object."""
        text, marker = self._take(*_ENDS)
        self._emit(text)
        if not marker:
            return False
        if self._in_call and self._is_empty:
            self._arguments("{}")
        self._end()
        self._next_header(marker)
        return True

    def _call_body(self) -> bool:
        if not self._skip_space():
            return False
        self._scanner = ValueScanner()
        self._state = self._object if self._buffer[0] == "{" else self._body
        return True

    def _object(self) -> bool:
        """Read arguments, in whose texts markers have no meaning."""
        return self._read_arguments(self._scanner, self._after_object)

    def _after_object(self) -> bool:
        _, marker = self._take(*_ENDS)
        if marker:
            self._next_header(marker)
        return bool(marker)

    def _next_header(self, marker: str) -> None:
        self.in_reasoning = False
        self._state = self._text
        if marker == _CHANNEL_BEGIN:
            self._buffer = marker + self._buffer

    def _emit(self, text: str) -> None:
        self._is_empty = self._is_empty and not text.strip()
        if self._in_call:
            self._arguments(text)
        elif self.in_reasoning:
            self._reasoning(text)
        else:
            self._content(text)

    def _rest(self) -> None:
        if self._state == self._text and not self._has_header and not _HEADER.match(self._header):
            self._content(self._header)

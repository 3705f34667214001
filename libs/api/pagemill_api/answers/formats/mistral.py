"""Mistral's formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, newer ones `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.formats.hermes import HermesParser
from pagemill_api.answers.json_text import ValueScanner

_WORDS = re.compile(r"\S\s+\S")
"""Words after the marker are text; the name of a function is one word."""
_MAX_NAME_CHARS = 256
_BEGIN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LIST = CallSyntax(
    begin='{"name": "%s", "arguments": ',
    end="}",
    opening=_BEGIN + "[",
    separator=", ",
    closing="]",
    trigger=_BEGIN,
)
_NAMED = CallSyntax(begin="%s" + _ARGS, end="", opening=_BEGIN, separator=_BEGIN, trigger=_BEGIN)


def syntax(template: str) -> CallSyntax:
    return _NAMED if _ARGS in template else _LIST


class MistralParser(HermesParser):
    call_markers = (_BEGIN,)

    def _text(self) -> bool:
        text, marker = self._take(_BEGIN)
        self._content(text)
        if marker:
            self._state = self._shape
        return bool(marker)

    def _shape(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] in "[{":
            self._state = self._after
        else:
            self._name = ""
            self._state = self._named
        return True

    def _after(self) -> bool:
        """Read up to the next object of a list."""
        self._buffer = self._buffer.lstrip("[, \t\r\n")
        if self._buffer[:1] == "{":
            self._start("")
        elif self._buffer:
            self._buffer = self._buffer.removeprefix("]")
            self._state = self._text
        return bool(self._buffer)

    def _named(self) -> bool:
        text, marker = self._take(_ID, _ARGS, "{")
        self._name += text
        if len(self._name) > _MAX_NAME_CHARS or _WORDS.search(self._name):
            self._buffer = self._name + marker + self._buffer
            self._state = self._text
            return True
        if not marker:
            return False
        self._begin(self._name.strip())
        if marker == "{":
            self._buffer = marker + self._buffer
        self._scanner, self._is_empty = ValueScanner(), True
        self._state = self._call_id if marker == _ID else self._value
        return True

    def _call_id(self) -> bool:
        _, marker = self._take(_ARGS)
        if marker:
            self._state = self._value
        return bool(marker)

    def _value(self) -> bool:
        if self._is_empty and not self._skip_space():
            return False
        self._is_empty = False
        return self._read_arguments(self._scanner, self._text)

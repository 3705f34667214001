"""Mistral's formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, newer ones `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.formats.hermes import HermesParser
from pagemill_api.answers.json_text import ValueScanner

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
        if not marker:
            return False
        name = self._name.strip()
        if not name:
            self._content(marker)
            self._state = self._text
            return True
        self._begin(name)
        if marker == "{":
            self._buffer = marker + self._buffer
        self._scanner = ValueScanner()
        self._state = self._call_id if marker == _ID else self._value
        return True

    def _call_id(self) -> bool:
        _, marker = self._take(_ARGS)
        if marker:
            self._state = self._value
        return bool(marker)

    def _value(self) -> bool:
        end = self._scanner.scan(self._buffer)
        self._arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if self._scanner.done:
            self._end()
            self._state = self._text
        return bool(self._buffer)

    def _rest(self) -> None:
        super()._rest()
        if self._state == self._named:
            self._content(self._name)

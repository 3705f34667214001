"""Hermes' format, which Qwen and many others use: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.json_text import CallObject
from pagemill_api.answers.markup import MarkupParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
SYNTAX = CallSyntax(
    begin='\n{"name": "%s", "arguments": ',
    end="}\n" + _END,
    opening=_BEGIN,
    separator="\n" + _BEGIN,
    trigger=_BEGIN,
)


class HermesParser(MarkupParser):
    call_markers: Sequence[str] = (_BEGIN,)

    def _text(self) -> bool:
        text, marker = self._take(_BEGIN)
        self._content(text)
        if not marker:
            return False
        self._start(marker)
        return True

    def _start(self, raw: str) -> None:
        self._call = CallObject()
        self._raw = raw
        """Text of a call that has not begun; it becomes content if it is not a call."""
        self._state = self._object

    def _object(self) -> bool:
        events, length = self._call.feed(self._buffer)
        self._raw += self._buffer[:length]
        self._buffer = self._buffer[length:]
        for event in events:
            self._in_call = True
            self._events.append(event)
        if self._call.failed and not self._call.begun:
            self._content(self._raw)
            self._state = self._text
        elif self._call.done or self._call.failed:
            self._end()
            self._state = self._after
        return bool(self._buffer)

    def _after(self) -> bool:
        _, marker = self._take(_END, _BEGIN)
        if marker == _END:
            self._state = self._text
        elif marker == _BEGIN:
            self._start(marker)
        return bool(marker)

    def _rest(self) -> None:
        if self._state == self._object and self._call.has_arguments:
            self._end()

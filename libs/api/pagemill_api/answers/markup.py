"""Base of the parsers: a buffer that states read. It defines no format.

A state reads `_buffer`, appends to `_events` and returns True when it consumed something or set another `_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.answers.json_text import ValueScanner


class MarkupParser:
    call_markers: Sequence[str] = ()
    """Texts that begin calls wherever they are."""
    in_reasoning = False

    def __init__(self) -> None:
        self._buffer = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._text
        self._final = False
        """No text follows: nothing has to be held back."""
        self._in_call = False
        self._follows_call = False
        """Only white space was read since the last call: the beginning of a marker at the end of the text is dropped,
        while after words it is text."""

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        self._final = True
        events = self.push("")
        self._rest()
        events += self._events
        self._events = []
        return events

    def _text(self) -> bool:
        """Read the buffer in the first state."""
        raise NotImplementedError

    def _rest(self) -> None:
        """Emit what the current state held back, after the end of the text, except parts of incomplete calls."""

    def _take(self, *markers: str, releases: bool = True) -> tuple[str, str]:
        """Consume the text before the first of `markers`, and that marker, which is "" if there is none yet.

        `releases`: the beginning of a marker at the end of the answer is text.
        """
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            return text, marker
        at = _held_from(self._buffer, markers)
        if self._final and releases and not (self._follows_call and not self._buffer[:at].strip()):
            at = len(self._buffer)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        return text, ""

    def _read_arguments(self, scanner: ValueScanner, after: Callable[[], bool]) -> bool:
        """Read the arguments of the call, one JSON value, which ends the call and sets the state `after`."""
        end = scanner.scan(self._buffer)
        self._arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if scanner.done:
            self._end()
            self._state = after
        return bool(self._buffer)

    def _skip_space(self) -> bool:
        """Remove leading white space. Returns whether anything follows."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
            self._follows_call &= text.isspace()

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _begin(self, name: str) -> None:
        self._end()
        self._in_call = True
        self._events.append(CallBegin(name))

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def _end(self) -> None:
        if self._in_call:
            self._in_call = False
            self._follows_call = True
            self._events.append(CallEnd())


def _held_from(text: str, markers: tuple[str, ...]) -> int:
    """Return the start of the longest suffix of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)

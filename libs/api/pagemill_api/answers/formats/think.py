"""Reasoning between two markers at the start of an answer, such as `<think>...</think>`; the rest is content.

Some models write markers around the content, too, as Hunyuan's `<answer>...</answer>`. A tool call ends reasoning
too, since models sometimes leave out the end marker before one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagemill_api.answers.events import CallBegin, Content, Parser
from pagemill_api.answers.markup import MarkupParser


class ThinkParser(MarkupParser):
    def __init__(
        self,
        begin: str,
        end: str,
        is_open: bool,
        call_markers: Sequence[str] = (),
        tool_parser: Callable[[], Parser] | None = None,
        enclosed: tuple[str, str] | None = None,
    ) -> None:
        """Parse reasoning between `begin` and `end`.

        `is_open`: the prompt already ends with `begin`. `call_markers`: texts that begin tool calls; `tool_parser`
        makes the parser that decides whether one does. `enclosed`: markers around the content, which may be missing.
        """
        super().__init__()
        self._call_markers, self._tool_parser = call_markers, tool_parser
        self._begin_marker, self._end_marker = begin, end
        self._enclosed, self._space = enclosed, ""
        self.in_reasoning = is_open
        if is_open:
            self._state = self._inside

    def _text(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self._begin_marker):
            self._buffer = rest[len(self._begin_marker) :]
            self.in_reasoning = True
            self._state = self._inside
        elif not self._final and self._begin_marker.startswith(rest):
            return False
        else:
            self._state = self._opening
        return True

    def _inside(self) -> bool:
        text, marker = self._take(self._end_marker, *self._call_markers)
        self._reasoning(text)
        if marker == self._end_marker:
            self.in_reasoning = False
            self._state = self._gap
        elif marker and self._tool_parser is not None:
            self._marker, self._raw, self._tail = marker, marker, ""
            self._tools = self._tool_parser()
            self._tools.push(marker)
            self._state = self._possible_call
        return bool(marker)

    def _possible_call(self) -> bool:
        """Read text after a call marker until it is a call, which ends the reasoning, or is none."""
        for at, char in enumerate(self._buffer, start=1):
            events = self._tools.push(char)
            self._tail = (self._tail + char)[-len(self._end_marker) :]
            if any(isinstance(event, CallBegin) for event in events):
                self.in_reasoning = False
                self._buffer = self._raw + self._buffer
                self._state = self._outside
                return True
            if self._tail == self._end_marker or any(isinstance(event, Content) for event in events):
                self._reasoning(self._marker)
                self._buffer = self._raw[len(self._marker) :] + self._buffer
                self._state = self._inside
                return True
            if at == len(self._buffer):
                self._raw, self._buffer = self._raw + self._buffer, ""
        return False

    def _gap(self) -> bool:
        """Drop the white space between reasoning and content."""
        if self._skip_space():
            self._state = self._opening
        return bool(self._buffer)

    def _opening(self) -> bool:
        """Read the marker before the content, if there is one."""
        rest, begin = self._buffer.lstrip(), self._enclosed[0] if self._enclosed else ""
        if begin and rest.startswith(begin):
            self._buffer = rest[len(begin) :]
            self._state = self._beginning
        elif begin and not self._final and begin.startswith(rest):
            return False
        else:
            self._state = self._outside
        return True

    def _beginning(self) -> bool:
        if self._skip_space():
            self._state = self._between
        return bool(self._buffer)

    def _between(self) -> bool:
        """Read content up to the marker behind it, without the white space before that."""
        assert self._enclosed is not None
        text, marker = self._take(self._enclosed[1])
        text = self._space + text
        self._space = text[len(text.rstrip()) :]
        self._content(text.rstrip())
        if marker:
            self._space = ""
            self._state = self._behind
        return bool(marker)

    def _behind(self) -> bool:
        if self._skip_space():
            self._state = self._outside
        return bool(self._buffer)

    def _outside(self) -> bool:
        self._content(self._buffer)
        self._buffer = ""
        return False

    def _rest(self) -> None:
        self._content(self._space)
        if self._state != self._possible_call:
            return
        events = self._tools.finish()
        if any(isinstance(event, CallBegin) for event in events):
            self._content(self._raw)
        elif any(isinstance(event, Content) for event in events):
            self._reasoning(self._raw)

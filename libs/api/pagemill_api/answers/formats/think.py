"""Reasoning between two markers at the start of an answer, such as `<think>...</think>`; the rest is content."""

from __future__ import annotations

from pagemill_api.answers.markup import MarkupParser


class ThinkParser(MarkupParser):
    def __init__(self, begin: str, end: str, is_open: bool) -> None:
        """Parse reasoning between `begin` and `end`. `is_open`: the prompt already ends with `begin`."""
        super().__init__()
        self._begin_marker, self._end_marker = begin, end
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
            self._state = self._outside
        return True

    def _inside(self) -> bool:
        text, marker = self._take(self._end_marker)
        self._reasoning(text)
        if marker:
            self.in_reasoning = False
            self._state = self._gap
        return bool(marker)

    def _gap(self) -> bool:
        """Drop the white space between reasoning and content."""
        if self._skip_space():
            self._state = self._outside
        return bool(self._buffer)

    def _outside(self) -> bool:
        self._content(self._buffer)
        self._buffer = ""
        return False

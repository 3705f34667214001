"""Formats that write calls as one JSON list between two markers, as `<TOOLCALL>[{"name": ...}, ...]</TOOLCALL>`.

Nemotron Nano 2 and Hunyuan A13B.
"""

from __future__ import annotations

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.formats.hermes import HermesParser

NEMOTRON = ("<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = ("<tool_calls>", "</tool_calls>")


def syntax_of(begin: str, end: str) -> CallSyntax:
    return CallSyntax(
        begin='{"name": "%s", "arguments": ',
        end="}",
        opening=f"{begin}[",
        separator=", ",
        closing=f"]{end}",
        trigger=begin,
    )


class JsonListParser(HermesParser):
    def __init__(self, begin: str, end: str) -> None:
        super().__init__()
        self.call_markers = (begin,)
        self._end_marker = end

    def _text(self) -> bool:
        text, marker = self._take(*self.call_markers)
        self._content(text)
        if marker:
            self._opening = marker
            self._state = self._after
        return bool(marker)

    def _start(self, raw: str) -> None:
        super()._start(self._opening + raw)
        self._opening = ""

    def _after(self) -> bool:
        """Read up to the next object of the list, or behind the end marker."""
        kept = self._buffer.lstrip("[], \t\r\n")
        if self._opening:
            self._opening += self._buffer[: len(self._buffer) - len(kept)]
        self._buffer = kept
        if kept[:1] == "{":
            self._start("")
        elif kept and self._end_marker.startswith(kept[: len(self._end_marker)]):
            if len(kept) < len(self._end_marker):
                return False
            self._buffer = kept[len(self._end_marker) :]
            self._state = self._text
        elif kept:
            self._content(self._opening)
            self._state = self._text
        return bool(self._buffer)

"""DeepSeek's formats: V3 and R1 write the call's type and fence its JSON, V3.1 writes only name and JSON.

Kimi K2 writes the same with other markers, and the call's id, `functions.NAME:NUMBER`, in place of the name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.json_text import ValueScanner
from pagemill_api.answers.markup import MarkupParser


class CallMarkers(NamedTuple):
    begin: str
    end: str
    call: str
    call_end: str
    separator: str


DEEPSEEK = CallMarkers(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)
KIMI_K2 = CallMarkers(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
_FENCE = "```json"
_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?", re.DOTALL)


def _plain(markers: CallMarkers, header: str) -> CallSyntax:
    return CallSyntax(
        begin=header + markers.separator,
        end=markers.call_end,
        opening=markers.begin + markers.call,
        separator=markers.call,
        closing=markers.end,
        trigger=markers.begin,
    )


_V31 = _plain(DEEPSEEK, "%s")
_V3 = _V31._replace(
    begin=f"function{DEEPSEEK.separator}%s\n{_FENCE}\n",
    end="\n```" + DEEPSEEK.call_end,
    separator="\n" + DEEPSEEK.call,
)
KIMI_K2_SYNTAX = _plain(KIMI_K2, "functions.%s:0")


def syntax(template: str) -> CallSyntax:
    return _V3 if _FENCE in template else _V31


class DeepSeekParser(MarkupParser):
    def __init__(self, markers: CallMarkers = DEEPSEEK) -> None:
        super().__init__()
        self._markers = markers
        self.call_markers = (markers.begin,)

    def _text(self) -> bool:
        text, marker = self._take(self._markers.begin)
        self._content(text)
        if marker:
            self._state = self._between
        return bool(marker)

    def _between(self) -> bool:
        _, marker = self._take(self._markers.call, self._markers.end)
        self._head = ""
        if marker:
            self._state = self._name if marker == self._markers.call else self._text
        return bool(marker)

    def _name(self) -> bool:
        text, marker = self._take(self._markers.separator)
        self._head += text
        if not marker:
            return False
        if self._head.strip() == "function":
            self._head = ""
            self._state = self._name_line
            return True
        return self._named()

    def _name_line(self) -> bool:
        """Read the name of V3's format, which follows the separator up to the end of the line."""
        text, marker = self._take("\n")
        self._head += text
        return self._named() if marker else False

    def _named(self) -> bool:
        name = self._head.strip()
        if self._markers is KIMI_K2 and (found := _ID.fullmatch(name)) is not None:
            name = found["name"]
        self._begin(name)
        self._scanner = ValueScanner()
        self._state = self._opening
        return True

    def _opening(self) -> bool:
        """Skip what precedes the JSON: white space, or a fence."""
        _, marker = self._take("{", self._markers.call_end)
        if marker == "{":
            self._buffer = marker + self._buffer
            self._state = self._value
        elif marker:
            self._arguments("{}")
            self._end()
            self._state = self._between
        return bool(marker)

    def _value(self) -> bool:
        return self._read_arguments(self._scanner, self._between)

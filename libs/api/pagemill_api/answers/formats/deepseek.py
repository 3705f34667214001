"""DeepSeek's formats: V3 and R1 write the call's type and fence its JSON, V3.1 writes only name and JSON."""

from __future__ import annotations

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.json_text import ValueScanner
from pagemill_api.answers.markup import MarkupParser

BEGIN = "<｜tool▁calls▁begin｜>"
_END = "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```json"
_V3 = CallSyntax(
    begin=f"function{_SEPARATOR}%s\n{_FENCE}\n",
    end="\n```" + _CALL_END,
    opening=BEGIN + _CALL,
    separator="\n" + _CALL,
    closing=_END,
    trigger=BEGIN,
)
_V31 = _V3._replace(begin="%s" + _SEPARATOR, end=_CALL_END, separator=_CALL)


def syntax(template: str) -> CallSyntax:
    return _V3 if _FENCE in template else _V31


class DeepSeekParser(MarkupParser):
    call_markers = (BEGIN,)

    def _text(self) -> bool:
        text, marker = self._take(BEGIN)
        self._content(text)
        if marker:
            self._state = self._between
        return bool(marker)

    def _between(self) -> bool:
        _, marker = self._take(_CALL, _END)
        self._head = ""
        if marker:
            self._state = self._name if marker == _CALL else self._text
        return bool(marker)

    def _name(self) -> bool:
        text, marker = self._take(_SEPARATOR)
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
        self._begin(self._head.strip())
        self._scanner = ValueScanner()
        self._state = self._opening
        return True

    def _opening(self) -> bool:
        """Skip what precedes the JSON: white space, or a fence."""
        _, marker = self._take("{", _CALL_END)
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

"""Llama 3's JSON: the answer is `{"name": ..., "parameters": {...}}`; several are separated by `;` or commas."""

from __future__ import annotations

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.formats.hermes import HermesParser
from pagemill_api.structural_tags import Optional, Regex

_TAG = "<|python_tag|>"
_SEPARATORS = ";,[]"
SYNTAX = CallSyntax(
    begin='{"name": "%s", "parameters": ',
    end="}",
    separator="; ",
    text=Optional(content=Regex(pattern=r"\s*[^\s{<](.|\n)*")),
)


class Llama3JsonParser(HermesParser):
    """Parses the objects of Hermes' format without markers: a call starts where the answer does, or after `_TAG`."""

    def _text(self) -> bool:
        if not self._skip_space():
            return False
        if not self._final and _TAG.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(_TAG)
        if self._buffer[:1] == "{":
            self._start("")
        else:
            self._state = self._words
        return True

    def _object(self) -> bool:
        goes_on = super()._object()
        if self._state == self._text:  # the object is not a call
            self._state = self._words
        return goes_on

    def _words(self) -> bool:
        text, marker = self._take(_TAG)
        self._content(text)
        if marker:
            self._state = self._text
        return bool(marker)

    def _after(self) -> bool:
        self._buffer = self._buffer.lstrip(_SEPARATORS + " \t\r\n")
        if not self._buffer:
            return False
        self._state = self._text
        return True

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

    call_markers = (_TAG,)
    _is_tagged = False
    """Whether `_TAG` or a call was read: an object that is cut is a call then, otherwise it may be any answer."""

    def _text(self) -> bool:
        if not self._skip_space():
            return False
        if not self._final and _TAG.startswith(self._buffer):
            return False
        self._is_tagged |= self._buffer.startswith(_TAG)
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
            self._is_tagged = True
            self._state = self._text
        return bool(marker)

    def _after(self) -> bool:
        self._is_tagged = True
        self._buffer = self._buffer.lstrip(_SEPARATORS + " \t\r\n")
        if not self._buffer:
            return False
        self._state = self._text
        return True

    def _rest(self) -> None:
        super()._rest()
        if self._state == self._object and not (self._call.begun or self._is_tagged):
            self._content(self._raw)

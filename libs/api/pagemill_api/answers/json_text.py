"""Incremental JSON: find where a value ends, and the parts of a call object. Nothing else is validated."""

from __future__ import annotations

import json
import re
from typing import Any

from pagemill_api.answers.events import CallArguments, CallBegin, Event

_OPEN, _CLOSE = "([{", ")]}"
_SCALAR_END = re.compile(r"[\s,\]})]")
_IGNORED_KEYS = frozenset({"type", "id"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class ValueScanner:
    """Finds the end of one value: an object, a list, a string or a scalar. `quotes`: the characters that quote text."""

    def __init__(self, quotes: str = '"') -> None:
        self.done = False
        self._quotes = quotes
        self._depth = 0
        self._quote = ""
        self._is_scalar = False
        self._structure = re.compile(f"[{quotes}{re.escape(_OPEN + _CLOSE)}]")

    def scan(self, text: str, at: int = 0) -> int:
        """Return the end of the value's part in `text[at:]`, as an index of `text`; `done` says whether the value ends
        there."""
        while at < len(text) and not self.done:
            at = self._string(text, at) if self._quote else self._outside(text, at)
        return at

    def _outside(self, text: str, at: int) -> int:
        if not self._depth and (self._is_scalar or text[at] not in self._quotes + _OPEN):
            self._is_scalar = True
            end = _SCALAR_END.search(text, at)
            self.done = end is not None
            return end.start() if end is not None else len(text)
        found = self._structure.search(text, at)
        if found is None:
            return len(text)
        char = found[0]
        if char in self._quotes:
            self._quote = char
        else:
            self._depth += 1 if char in _OPEN else -1
            self.done = not self._depth
        return found.end()

    def _string(self, text: str, at: int) -> int:
        if self._quote.endswith("\\"):  # the character after a backslash
            self._quote = self._quote[0]
            return at + 1
        found = re.compile(rf"[\\{self._quote}]").search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._quote += "\\"
        else:
            self._quote = ""
            self.done = not self._depth
        return found.end()


class CallObject:
    """One object `{"name": ..., "arguments": {...}}`, with its keys in any order; `parameters` means `arguments`.

    `failed`: the text is not a call; no event was returned unless the call had `begun`.
    """

    def __init__(self) -> None:
        self.begun = self.done = self.failed = False
        self._events: list[Event] = []
        self._next = "{"
        """The expected next part: `{`, the `"` of a key, `:`, a value, or the rest of one."""
        self._scanner = ValueScanner()
        self._key = ""
        self._held = ""
        """Text read so far of the current key or value."""
        self._arguments: str | None = None
        """Arguments that were read before the name; "" once they were returned."""

    @property
    def has_arguments(self) -> bool:
        """Whether the call's name and arguments are complete; the object itself may not be."""
        return self.begun and self._arguments is not None and not (self._next == "rest" and self._key in _ARGUMENT_KEYS)

    def feed(self, text: str) -> tuple[list[Event], int]:
        """Return events, and the number of characters of `text` that belong to the object."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._next in ("rest", "key"):
                at = self._read(text, at)
            elif text[at].isspace():
                at += 1
            else:
                at = self._expect(text, at)
        events, self._events = self._events, []
        return events, at

    def _expect(self, text: str, at: int) -> int:
        char = text[at]
        if self._next == "value":
            self._next, self._scanner, self._held = "rest", ValueScanner(), ""
            return at
        if self._next == '"' and char == '"':
            self._next, self._scanner, self._held = "key", ValueScanner(), ""
            return at
        if self._next == '"' and char == "}":
            self._complete()
        elif self._next == ":" == char:
            self._next = "value"
        elif self._next == "{" == char:
            self._next = '"'
        elif not (self._next == '"' and char == ","):
            self.failed = True
            return at
        return at + 1

    def _read(self, text: str, at: int) -> int:
        end = self._scanner.scan(text, at)
        piece = text[at:end]
        if self._streams(piece):
            self._events.append(CallArguments(piece))
            self._arguments = ""
        self._held += piece
        if self._scanner.done:
            (self._end_key if self._next == "key" else self._end_value)()
        return end

    def _streams(self, piece: str) -> bool:
        is_object = (self._held or piece).startswith("{")
        return bool(piece) and self._next == "rest" and self._key in _ARGUMENT_KEYS and self.begun and is_object

    def _end_key(self) -> None:
        self._key = _text(self._held)
        self._next = ":"
        self.failed = self._key not in {"name"} | _IGNORED_KEYS | _ARGUMENT_KEYS

    def _end_value(self) -> None:
        self._next = '"'
        if self._key == "name":
            name = _text(self._held)
            if self.begun or not name:
                self.failed = True
                return
            self.begun = True
            self._events.append(CallBegin(name))
            if self._arguments is not None:
                self._events.append(CallArguments(self._arguments))
                self._arguments = ""
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = _arguments(self._held)
            if self.begun:
                self._events.append(CallArguments(self._arguments))

    def _complete(self) -> None:
        self.done = self.begun
        self.failed = not self.begun
        if self.begun and self._arguments is None:
            self._events.append(CallArguments("{}"))


def json_of(value: Any) -> str:
    """Return JSON text that can be encoded: surrogate pairs are joined, lone surrogates replaced."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(raw: str) -> str:
    """Return the string that the JSON text `raw` encodes; "" if it is not a string."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _arguments(raw: str) -> str:
    """Return arguments as the JSON text of an object: some models write them as a string, or null."""
    if raw == "null":
        return "{}"
    return (_text(raw) or "{}") if raw.startswith('"') else raw

"""JSON objects that were cut: the values that are complete. Whole JSON is read elsewhere."""

from __future__ import annotations

import re
from typing import Any

import orjson

from pagemill_protocol import nesting

_BRACKETS = {"{": "}", "[": "]"}
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*(?P<quote>")?|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def cut_object(text: str) -> dict[str, Any] | None:
    """Return the complete values of an object that ends before its last bracket, as clients read them from a stream.

    None: the text is no beginning of an object, or one too deep for clients and renderers.
    """
    kept, closing, previous = "", "", ""
    brackets: list[str] = []
    for found in _PARTS.finditer(text):
        part = found[0]
        is_bracket = part in _BRACKETS or part in _BRACKETS.values()
        is_value = previous == ":" or brackets[-1:] == ["]"]
        if part in _BRACKETS:
            brackets.append(_BRACKETS[part])
        elif is_bracket:
            brackets = brackets[:-1]
        is_complete = found["quote"] if part[0] == '"' else _value(part.encode()) is not _BROKEN
        if is_bracket or (is_value and is_complete and part not in ",:"):
            kept, closing = text[: found.end()], "".join(reversed(brackets))
        previous = part
    value = _value((kept + closing).encode(errors="replace"))
    return value if brackets and isinstance(value, dict) and not nesting.exceeds(value) else None


_BROKEN = object()


def _value(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _BROKEN

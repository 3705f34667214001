"""JSON that every reader of lines takes for one line.

JSON allows U+2028, U+2029 and U+0085 within strings, and readers such as `httpx.iter_lines` and Python's `splitlines`
end a line there. So streams and files of lines escape them; other control characters are always escaped in JSON.
"""

from __future__ import annotations

_SEPARATORS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u2028\u2029\u0085")
_BEGINNINGS = tuple(raw[:length] for raw, _ in _SEPARATORS for length in range(len(raw) - 1, 0, -1))


def on_one_line(data: bytes) -> bytes:
    """Return JSON in UTF-8 with all line separators escaped."""
    if data.isascii():
        return data
    for raw, escaped in _SEPARATORS:
        data = data.replace(raw, escaped)
    return data


class OneLine:
    """Escapes JSON that arrives in pieces, which may divide a character."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> bytes:
        data = self._held + data
        self._held = next((each for each in _BEGINNINGS if data.endswith(each)), b"")
        return on_one_line(data[: len(data) - len(self._held)])

    def flush(self) -> bytes:
        """Return what was held back at the end of the text."""
        held, self._held = self._held, b""
        return held

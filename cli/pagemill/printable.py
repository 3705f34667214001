"""Removes control characters from text of models, servers and files before it is written to a terminal."""

from __future__ import annotations

_C0, _DELETE, _C1 = range(0x20), 0x7F, range(0x80, 0xA0)
_CONTROLS = dict.fromkeys(code for code in (*_C0, _DELETE, *_C1) if chr(code) not in "\n\t")


def printable(text: str) -> str:
    """Return the text without control characters (ECMA-48's C0 and C1 sets, DEL) other than line feed and tab."""
    return text.translate(_CONTROLS)

"""Grammars that clients write, in Lark's syntax: as they are, GBNF converted."""

from __future__ import annotations

from llguidance.gbnf_to_lark import any_to_lark


def as_lark(text: str) -> str:
    """Raises `ValueError` for what looks like GBNF and is not."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises plain `Exception`
        raise ValueError(f"it is not GBNF: {error}") from None

"""Grammars of clients in Lark's syntax: used as they are, or converted from GBNF."""

from __future__ import annotations

from llguidance.gbnf_to_lark import any_to_lark


def as_lark(text: str) -> str:
    """Return the grammar in Lark's syntax. Raises `ValueError` for invalid GBNF."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises plain `Exception`
        raise ValueError(f"it is not GBNF: {error}") from None

"""Reads the query parameters of the routes below `/ui`, and refuses those that name no possible value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pagemill_gateway.ports import WhatIf
from pagemill_protocol.errors import invalid_field, show

MAX_REPLICAS = 10_000
MAX_TOKENS = 100_000_000
MAX_REQUESTS_PER_S = 1_000_000.0


class _Bounds(NamedTuple):
    """A range with its ends, for the rate without the lower one."""

    low: float
    high: float
    is_whole: bool = True


FIELDS = {
    "replicas": _Bounds(1, MAX_REPLICAS),
    "requests_per_s": _Bounds(0, MAX_REQUESTS_PER_S, is_whole=False),
    "prompt_tokens": _Bounds(1, MAX_TOKENS),
    "cached_tokens": _Bounds(0, MAX_TOKENS),
    "output_tokens": _Bounds(1, MAX_TOKENS),
    "percentile": _Bounds(1, 99.9, is_whole=False),
}


def read_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Return `limit`. Raises `PagemillError` 400."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= most):
        raise invalid_field("limit", f"limit must be a whole number of decisions from 1 to {most}, got {show(text)}.")
    return int(text)


def read_what_if(query: Mapping[str, str]) -> WhatIf:
    """Return the question; empty parameters are as measured. Raises `PagemillError` 400."""
    if not query.get("deployment"):
        raise invalid_field("deployment", "deployment is missing. Name one as NAMESPACE/NAME.")
    numbers = {name: _number(name, text, FIELDS[name]) for name, text in query.items() if name in FIELDS and text}
    return WhatIf(query["deployment"], **numbers)  # type: ignore[arg-type]  # `is_whole` says which are integers


def _number(name: str, text: str, bounds: _Bounds) -> float | int:
    try:
        number = float(text) if text.isascii() and len(text) <= 20 else float("nan")
    except ValueError:
        number = float("nan")
    is_valid = bounds.low <= number <= bounds.high and (not bounds.is_whole or number == int(number))
    if not is_valid or (name == "requests_per_s" and number <= 0):
        kind = "a whole number" if bounds.is_whole else "a number"
        lowest = "above 0" if name == "requests_per_s" else f"from {bounds.low:g}"
        raise invalid_field(name, f"{name} must be {kind} {lowest} to {bounds.high:,.10g}, got {show(text)}.")
    return int(number) if bounds.is_whole else number

"""Bounds of the numbers that model files declare: beyond them a header is damaged, and building it would hang."""

from __future__ import annotations

from pathlib import Path

from pagemill_protocol.source_errors import UnreadableModelError

_LARGEST = {
    "num_layers": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
}
_LARGEST_OTHER = 1 << 24


def check_size(path: Path, field: str, value: int) -> int:
    """Return `value`, or raise an error that names the field: a key of the table above or any other name."""
    limit = _LARGEST.get(field, _LARGEST_OTHER)
    if not 0 < value <= limit:
        raise UnreadableModelError(f"`{path}` declares {field} = {value}; it must be from 1 to {limit}.")
    return value


def check_fraction(path: Path, field: str, value: float) -> float:
    """Return `value`, or raise an error: an epsilon must lie between 0 and 1."""
    if not 0 < value < 1:
        raise UnreadableModelError(f"`{path}` declares {field} = {value}; it must lie between 0 and 1.")
    return value


def check_positive(path: Path, field: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UnreadableModelError(f"`{path}` declares {field} = {value}; it must be positive and finite.")
    return value

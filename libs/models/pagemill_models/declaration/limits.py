"""Bounds of the numbers that model files declare: beyond them a header is damaged, and building it would hang."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pagemill_protocol.source_errors import UnreadableModelError

_LARGEST = {
    "num_layers": 1024,
    "num_experts": 8192,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
}
_LARGEST_OTHER = 1 << 24
MAX_PARTS = 1 << 16
"""Most experts of all layers together: the largest published models have a third of it."""
PACKED = 32
"""Most values that one stored element may hold: bits of a 32-bit word."""
_ALWAYS = {"num_layers": 128, "num_experts": 256}
_ALWAYS_SIZE, _ALWAYS_PARTS = 1 << 20, 8192
"""Numbers that cost nothing worth a bound. Where the files hold less, the check of the weights says what is missing."""
_BOUND_BY_SHAPES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


class Held(NamedTuple):
    """What the headers of a model's weights hold, by which the numbers of its settings are bounded."""

    num_tensors: int
    largest_dim: int
    """The largest dimension of a tensor; for an index, which has no shapes, the bytes of all tensors."""
    num_stacked: int
    """Sum of the first dimensions of tensors with three or more, which hold the matrices of several experts."""

    def largest(self, field: str) -> tuple[int, str]:
        """Return the most that a number of that name can be, and what says so."""
        if field == "num_layers":
            return max(_ALWAYS[field], self.num_tensors), f"the files hold {self.num_tensors} tensors"
        if field == "num_experts":
            most = self.num_tensors + self.num_stacked
            return max(_ALWAYS[field], most), f"the files hold matrices of at most {most} experts"
        if field in _BOUND_BY_SHAPES:
            return max(
                _ALWAYS_SIZE, PACKED * self.largest_dim
            ), f"the largest dimension of a tensor is {self.largest_dim}"
        return _LARGEST_OTHER, ""


def held_by(shapes: Iterable[tuple[int, ...]]) -> Held:
    """Return what tensors of these shapes hold."""
    num_tensors, largest, stacked = 0, 0, 0
    for shape in shapes:
        num_tensors += 1
        largest = max(largest, *shape, 1)
        stacked += shape[0] if len(shape) > 2 else 0
    return Held(num_tensors, largest, stacked)


def check_size(path: Path, field: str, value: int, held: Held | None = None) -> int:
    """Return `value`, or raise an error that names the field: a key of the table above or any other name.

    `held`: what the files hold, where their headers are known.
    """
    limit = _LARGEST.get(field, _LARGEST_OTHER)
    if not 0 < value <= limit:
        raise UnreadableModelError(f"`{path}` declares {field} = {value}; it must be from 1 to {limit}.")
    most, reason = (limit, "") if held is None else held.largest(field)
    if value > most and reason:
        raise UnreadableModelError(
            f"`{path}` declares {field} = {value}, but {reason}. The settings or the weights are of another model: "
            "fetch them again."
        )
    return value


def check_parts(path: Path, what: str, num_parts: int, num_layers: int, held: Held | None = None) -> None:
    """Raise an error for more parts of layers than the files can hold in all layers together.

    `what`: name of the parts, each of which has matrices of its own.
    """
    most = MAX_PARTS if held is None else min(MAX_PARTS, max(_ALWAYS_PARTS, 2 * held.largest("num_experts")[0]))
    if num_parts * num_layers > most:
        raise UnreadableModelError(
            f"`{path}` declares {num_parts} {what} in each of {num_layers} layers; in all layers together there can be "
            f"{most}. The settings or the weights are of another model: fetch them again."
        )


def check_fraction(path: Path, field: str, value: float) -> float:
    """Return `value`, or raise an error: an epsilon must lie between 0 and 1."""
    if not 0 < value < 1:
        raise UnreadableModelError(f"`{path}` declares {field} = {value}; it must lie between 0 and 1.")
    return value


def check_positive(path: Path, field: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UnreadableModelError(f"`{path}` declares {field} = {value}; it must be positive and finite.")
    return value

"""What experts consist of, and what those that were made into one operation can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pagemill_kernels.linear.packed import PackedLinear


class Gate(NamedTuple):
    """What lies between an expert's two products; the arguments of `activation.reference.activate_and_mul`."""

    activation: str
    limit: float | None = None


class Gating(NamedTuple):
    """How experts are chosen by groups; `reference.route_by_groups` has the formula."""

    scores: str
    """`softmax` or `sigmoid`."""
    num_groups: int
    top_groups: int
    best_of_group: int
    scale: float


class ExpertParts(NamedTuple):
    """Loaded weights; biases are the packed layers' own."""

    up: PackedLinear
    """The gate's rows, then the up projection's."""
    down: PackedLinear


class FusedExperts(Protocol):
    @property
    def num_bytes(self) -> int:
        """Memory that all weights take."""
        ...

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        """out[t] += sum over j of weights[t, j] * expert chosen[t, j] of x[t], in place.

        out: contiguous [tokens, hidden]; x: [tokens, hidden]; chosen: int64 [tokens, top_k], no expert twice in a row;
        weights: float32 [tokens, top_k].
        """
        ...

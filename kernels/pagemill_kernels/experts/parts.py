"""The parts of experts, and the interface of fused experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pagemill_kernels.adapters.rows import ExpertRows
    from pagemill_kernels.linear.packed import PackedLinear


class Gate(NamedTuple):
    """What is between an expert's two matmuls: the arguments of `activation.reference.activate_and_mul`."""

    activation: str
    limit: float | None = None
    gated: bool = True
    """If not, the first matmul's outputs are only activated."""


class Gating(NamedTuple):
    """The choice of experts by groups; `reference.route_by_groups` has the formula."""

    scores: str
    """`softmax` or `sigmoid`."""
    num_groups: int
    top_groups: int
    best_of_group: int
    scale: float


class ExpertParts(NamedTuple):
    """Loaded weights of one expert; biases are in the packed linear layers."""

    up: PackedLinear
    """The gate's rows followed by the up projection's."""
    down: PackedLinear


class FusedExperts(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in memory."""
        ...

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, rows: ExpertRows | None = None) -> None:
        """Add sum over j of weights[t, j] * (expert chosen[t, j])(x[t]) to out[t], in place.

        out: contiguous [tokens, hidden]; x: [tokens, hidden]; chosen: int64 [tokens, top_k], no expert twice in a row;
        weights: float32 [tokens, top_k]; rows: the adapters of the tokens.
        """
        ...

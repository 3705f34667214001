"""What kernels of experts need to know of a declared mixture; `native` and `on_torch` build their experts with it."""

from __future__ import annotations

from pagemill_kernels.experts.parts import Gate, Gating
from pagemill_models.declaration.declaration import MoESpec


def gate_of(spec: MoESpec) -> Gate:
    first = spec.experts[0]
    return Gate(first.activation, first.limit, first.gated)


def gating_of(spec: MoESpec) -> Gating | None:
    """Return the choice of experts by groups; None: they are chosen by the softmax of the router's logits."""
    found = spec.gating
    if found is None:
        return None
    return Gating(found.scores, found.num_groups, found.top_groups, found.best_of_group, found.scale)

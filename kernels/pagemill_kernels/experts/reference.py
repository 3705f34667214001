"""The formulas: which experts a token is sent to, and what they compute, one expert after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill_kernels.activation.reference import activate_and_mul
from pagemill_kernels.experts.parts import ExpertParts, Gate


def route(logits: Tensor, top_k: int, renormalized: bool) -> tuple[Tensor, Tensor]:
    """logits: [tokens, experts]. Returns the chosen experts, int64 [tokens, top_k], and their weights, float32.

    The weights are the softmax over the chosen logits (`renormalized`) or their shares of the softmax over all.
    """
    if renormalized:
        values, chosen = logits.float().topk(top_k, dim=-1)
        return chosen, values.softmax(-1)
    weights, chosen = logits.float().softmax(-1).topk(top_k, dim=-1)
    return chosen, weights


class PlainExperts:
    """Over linear layers of any kind; each token's outputs are added in the order of the experts."""

    def __init__(self, experts: Sequence[ExpertParts], gate: Gate) -> None:
        self._experts, self._gate = experts, gate

    @property
    def num_bytes(self) -> int:
        return sum(each.up.num_bytes + each.down.num_bytes for each in self._experts)

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        for index in sorted(set(chosen.flatten().tolist())):
            tokens, slots = torch.where(chosen == index)
            expert = self._experts[index]
            result = expert.down(activate_and_mul(expert.up(x[tokens]), *self._gate))
            out.index_add_(0, tokens, (result * weights[tokens, slots, None]).to(out.dtype))


def pack_experts(experts: Sequence[ExpertParts], gate: Gate) -> PlainExperts:
    return PlainExperts(experts, gate)

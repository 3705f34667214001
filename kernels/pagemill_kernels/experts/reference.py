"""The formulas of routing and of experts, computed one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill_kernels.activation.reference import activate, activate_and_mul
from pagemill_kernels.adapters.rows import ExpertRows
from pagemill_kernels.experts.parts import ExpertParts, Gate, Gating


def route(logits: Tensor, top_k: int, renormalized: bool) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, int64 [tokens, top_k], and their weights, float32. logits: [tokens, experts].

    The weights are the softmax over the chosen logits (`renormalized`) or their shares of the softmax over all.
    """
    if renormalized:
        values, chosen = logits.float().topk(top_k, dim=-1)
        return chosen, values.softmax(-1)
    weights, chosen = logits.float().softmax(-1).topk(top_k, dim=-1)
    return chosen, weights


def route_by_groups(
    logits: Tensor, top_k: int, renormalized: bool, gating: Gating, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return chosen experts and weights like `route`, for DeepSeek's routers (arXiv 2405.04434, 2412.19437).

    The best experts of the `top_groups` groups whose `best_of_group` best scores have the largest sum; the choice is
    made by score + bias (float32 [experts]), the weights are scale * score, or with `renormalized` shares of the sum.
    """
    scores = logits.float().softmax(-1) if gating.scores == "softmax" else logits.float().sigmoid()
    wanted = scores if bias is None else scores + bias
    if gating.top_groups < gating.num_groups:
        groups = wanted.view(len(wanted), gating.num_groups, -1)
        best = groups.topk(gating.best_of_group, dim=-1).values.sum(-1).topk(gating.top_groups, dim=-1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        wanted = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    chosen = wanted.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * gating.scale


def add_gated(out: Tensor, x: Tensor, gates: Tensor) -> None:
    """Add x * sigmoid(gates) to out in place. x, out: [tokens, hidden]; gates: [tokens, 1].

    torch.sigmoid uses other instructions for the last elements of a batch, which would change their bits.
    """
    both = torch.cat([gates.float(), torch.zeros_like(gates, dtype=torch.float32)], -1)
    out.add_((x * both.softmax(-1)[:, :1]).to(out.dtype))


def activated_by(gate: Gate, inner: Tensor) -> Tensor:
    """Return what an expert's second matmul reads of what its first one gives, [rows, outputs]."""
    if not gate.gated:
        return activate(inner, gate.activation)
    return activate_and_mul(inner, gate.activation, gate.limit)


class PlainExperts:
    """Experts over linear layers of any kind. Each token's outputs are added in the order of the experts."""

    def __init__(self, experts: Sequence[ExpertParts], gate: Gate) -> None:
        self._experts, self._gate = experts, gate

    @property
    def num_bytes(self) -> int:
        return sum(each.up.num_bytes + each.down.num_bytes for each in self._experts)

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, rows: ExpertRows | None = None) -> None:
        for index in sorted(set(chosen.flatten().tolist())):
            tokens, slots = torch.where(chosen == index)
            expert, own = self._experts[index], x[tokens]
            inner = expert.up(own)
            if rows is not None:
                rows.add_up(inner, own, torch.full_like(tokens, index), tokens)
            activated = activated_by(self._gate, inner)
            result = expert.down(activated)
            if rows is not None:
                rows.add_down(result, activated, torch.full_like(tokens, index), tokens)
            out.index_add_(0, tokens, (result * weights[tokens, slots, None]).to(out.dtype))


def pack_experts(experts: Sequence[ExpertParts], gate: Gate) -> PlainExperts:
    return PlainExperts(experts, gate)

"""The formula of Mamba 2's state-space duality (arXiv 2405.21060), in float32. `native` is its counterpart in C++.

Of one head, with B, C and values x of a token, a step d = softplus(...) and a decay g = A d of at most 0:
S_t = exp(g_t) S_(t-1) + B_t (d_t x_t)^T and y_t = S_t^T C_t + D x_t. With c the sum of decays since the state S of a
group's begin, y_t = exp(c_t) S^T C_t + sum over i <= t of exp(c_t - c_i) (B_i . C_t) d_i x_i + D x_t: the products of
pairs that attention computes. A log has B, d x and g of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_kernels.recurrent.plan import StatePlan, TokenGroups, log_tokens


class StateSpaceHeads(NamedTuple):
    """The weights of a state space's heads, float32."""

    decays: Tensor
    """[heads]: A, at most 0."""
    biases: Tensor
    """[heads]: added to what steps are the softplus of."""
    skips: Tensor
    """[heads]: D."""
    norm: Tensor | None
    """[heads * head_dim]; None: outputs are only multiplied by silu(gate)."""
    norm_size: int
    """Values that are normalised together."""
    eps: float
    gates_first: bool
    """Whether gates are multiplied in before the norm."""
    step_limits: tuple[float, float]


def state_space(
    x: Tensor,
    steps: Tensor,
    gates: Tensor | None,
    heads: StateSpaceHeads,
    states: Tensor,
    log: Tensor,
    plan: StatePlan,
) -> Tensor:
    """Return the gated outputs, [tokens, heads, head_dim]; write states and log.

    x: [tokens, ...], the values of all heads, then the inputs and outputs of all groups, which divide heads. steps:
    [tokens, heads]. gates: [tokens, heads * head_dim]; None: outputs are neither gated nor normalised.
    states: [slots, heads, state_size, head_dim]. log: [rows, places, values of a token].
    """
    num_heads, state_size, head_dim = states.shape[1:]
    of_values = num_heads * head_dim
    num_groups = (x.shape[1] - of_values) // (2 * state_size)
    value = x[:, :of_values].float().reshape(len(x), num_heads, head_dim)
    read, written = x[:, of_values:].float().reshape(len(x), 2, num_groups, state_size).unbind(1)
    step = F.softplus(steps.float() + heads.biases).clamp(*heads.step_limits)
    stepped, decay = step[..., None] * value, heads.decays * step
    in_log = log[plan.log_rows, plan.log_places]
    logged = torch.split(in_log, [num_groups * state_size, of_values, num_heads], -1)
    groups = TokenGroups(plan)
    decays = groups.fill(decay, logged[2]).cumsum(2)
    values = groups.fill(stepped, logged[1].reshape(-1, num_heads, head_dim))
    keys, queries = groups.fill(read, logged[0].reshape(-1, num_groups, state_size)), groups.fill(written)
    keys, queries = (each.repeat_interleave(num_heads // num_groups, 1) for each in (keys, queries))
    above = torch.ones(plan.block_size, plan.block_size, dtype=torch.bool).triu(1)
    pairs = (decays[..., None] - decays[..., None, :]).masked_fill(above, -torch.inf).exp()
    outputs = (queries @ keys.transpose(-1, -2) * pairs) @ values
    grown = decays.exp()[..., None] * queries
    folds = ((decays[..., -1:] - decays).exp()[..., None] * keys).transpose(-1, -2) @ values
    whole = decays[..., -1].exp()[..., None, None]
    state = states[plan.sources]
    for requests, of_round, folded, kept, slots in plan.rounds:
        before = state[requests]
        outputs[of_round] += grown[of_round] @ before
        if len(folded):
            after = whole[of_round[folded]] * before[folded] + folds[of_round[folded]]
            state[requests[folded]] = after
            states[slots] = after[kept]
    new = plan.new_tokens
    values_of_new = torch.cat([read[new].flatten(1), stepped[new].flatten(1), decay[new]], -1)
    log_tokens(log, values_of_new, in_log, plan)
    out = outputs.transpose(1, 2)[plan.groups, plan.places] + heads.skips[:, None] * value
    return out if gates is None else _gated(out, gates.float().reshape(out.shape), heads)


def _gated(out: Tensor, gates: Tensor, heads: StateSpaceHeads) -> Tensor:
    gate = F.silu(gates)
    if heads.norm is None:
        return out * gate
    parts = (out * gate if heads.gates_first else out).reshape(len(out), -1, heads.norm_size)
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + heads.eps)
    normed = (normed.flatten(1) * heads.norm).view(out.shape)
    return normed if heads.gates_first else normed * gate

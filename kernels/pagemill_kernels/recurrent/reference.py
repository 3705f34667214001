"""The formulas of the short convolution and the delta rule, in float32. `state_space` has that of Mamba 2.

The delta rule of one value head, with keys k of length one, decays g (logarithms, at most 0) and rates b:
S_t = exp(g_t) S_(t-1) + k_t u_t^T with u_t = b_t (v_t - exp(g_t) S_(t-1)^T k_t), and o_t = S_t^T q_t. With c the sum of
decays since the state S of a group's begin, the u of a group solve a triangular system, as
u_t = b_t (v_t - exp(c_t) S^T k_t - sum over i < t of exp(c_t - c_i) (k_i . k_t) u_i). A log has k, u and g of a token.
With decays by channel g and c are vectors, whose exponentials are multiplied into the channels of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_kernels.norm.reference import rms_norm
from pagemill_kernels.recurrent.plan import StatePlan, TokenGroups, log_tokens

NORM_EPS = 1e-6


class Convolution(NamedTuple):
    """The weights of a convolution of single channels, float32."""

    taps: Tensor
    """[width, channels]."""
    bias: Tensor | None = None
    """[channels]."""
    activated: bool = True
    """Whether silu follows."""


class DeltaHeads(NamedTuple):
    """The weights of a delta rule's heads, float32."""

    decays: Tensor
    """[value heads]: at most 0."""
    biases: Tensor
    norm: Tensor
    """[value_dim]."""
    eps: float
    rate_scale: float = 1.0
    """Factor on b."""


def causal_convolution(x: Tensor, kernel: Convolution, windows: Tensor, inputs: Tensor, plan: StatePlan) -> Tensor:
    """Return the convolution of each token's values with those of the tokens before, [tokens, channels].

    x: [tokens, channels]. windows: [slots, width - 1, channels], the values before each
    state's boundary, where those of new states are written. inputs: [rows, width - 1 and room, channels]: of each
    row the last values before those that were proposed in its last step, and these.
    """
    width = len(kernel.taps)
    num_before = width - 1
    starts, ends = plan.starts, plan.ends
    # Rows of `padded`, for each request: accepted tokens, the values before the step, the step's tokens.
    sizes = num_before + plan.accepted
    shifts = sizes.cumsum(0)
    own = torch.arange(len(x)) + torch.repeat_interleave(shifts, ends - starts)
    firsts = starts + shifts - num_before
    steps = torch.arange(num_before)
    requests = torch.repeat_interleave(torch.arange(len(starts)), sizes)
    places = torch.arange(len(requests)) - torch.repeat_interleave(shifts - sizes, sizes)
    is_behind = plan.is_behind[requests]
    padded = torch.empty(len(x) + len(requests), x.shape[1])
    padded[own] = x.float()
    at = (starts + shifts - sizes)[requests] + places
    padded[at[is_behind]] = inputs[plan.rows[requests[is_behind]], places[is_behind]]
    padded[at[~is_behind]] = windows[plan.sources[requests[~is_behind]], places[~is_behind]]
    out = torch.zeros(x.shape, dtype=torch.float32)
    out = out if kernel.bias is None else out + kernel.bias
    for offset in range(width):
        out += padded[own - num_before + offset] * kernel.taps[offset]
    sizes = num_before + plan.proposed
    requests = torch.repeat_interleave(torch.arange(len(starts)), sizes)
    places = torch.arange(len(requests)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    lasts = firsts + (ends - starts) - plan.proposed
    inputs[plan.rows[requests], places] = padded[lasts[requests] + places]
    windows[plan.kept_slots] = padded[(firsts[plan.kept_requests] + plan.kept_tokens)[:, None] + steps]
    return F.silu(out) if kernel.activated else out


def delta_rule(
    x: Tensor, rates: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, log: Tensor, plan: StatePlan
) -> Tensor:
    """Return the outputs, [tokens, value heads, value_dim], each normalised and times silu(gate); write states and log.

    x: [tokens, ...], the queries and keys of all key heads, then the values of all value heads; key heads divide value
    heads. rates: [tokens, 2 * value heads]: b is rate_scale times the sigmoid of the first half, g = decays *
    softplus(the second + biases). gates: [tokens, value heads * value_dim].
    states: [slots, value heads, key_dim, value_dim]. log: [rows, places, values of a token].
    """
    rate, step = rates.float().chunk(2, -1)
    rate, decay = heads.rate_scale * rate.sigmoid(), heads.decays * F.softplus(step + heads.biases)
    out = _outputs(x, rate, decay[..., None], states, log, plan)
    out = rms_norm(out, heads.norm.float(), heads.eps)
    return out * F.silu(gates.float().reshape(out.shape))


def channel_delta_rule(
    x: Tensor,
    rates: Tensor,
    steps: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    states: Tensor,
    log: Tensor,
    plan: StatePlan,
) -> Tensor:
    """Return the outputs as `delta_rule` with decays by channel: g, c and their exponentials are vectors over keys'
    channels, by which keys and queries are multiplied. Outputs are multiplied by the sigmoid of their gates.

    x: as that of `delta_rule`, with as many key heads as value heads. rates: [tokens, heads]. steps: [tokens, heads *
    key_dim], from which decays are made with biases of that size.
    """
    num_heads, key_dim = states.shape[1:3]
    step = F.softplus(steps.float() + heads.biases).reshape(len(x), num_heads, key_dim)
    rate = heads.rate_scale * rates.float().sigmoid()
    out = _outputs(x, rate, heads.decays[:, None] * step, states, log, plan)
    out = rms_norm(out, heads.norm.float(), heads.eps)
    return out * gates.float().reshape(out.shape).sigmoid()


def _outputs(x: Tensor, rate: Tensor, decay: Tensor, states: Tensor, log: Tensor, plan: StatePlan) -> Tensor:
    """Return the rule's outputs, [tokens, value heads, value_dim]; write states and log.

    rate: [tokens, value heads]. decay: [tokens, value heads, 1 or key_dim].
    """
    num_values, key_dim, value_dim = states.shape[1:]
    num_keys = (x.shape[1] - num_values * value_dim) // (2 * key_dim)
    query, key = x[:, : 2 * num_keys * key_dim].reshape(len(x), 2, num_keys, key_dim).unbind(1)
    value = x[:, 2 * num_keys * key_dim :].reshape(len(x), num_values, value_dim)
    sizes = [num_keys * key_dim, num_values * value_dim, num_values * decay.shape[2]]
    query, key = _of_length_one(query) * key_dim**-0.5, _of_length_one(key)
    in_log = log[plan.log_rows, plan.log_places]
    logged = torch.split(in_log, sizes, -1)
    groups = TokenGroups(plan)
    queries = groups.fill(query)
    keys = groups.fill(key, logged[0].reshape(-1, num_keys, key_dim))
    decays = groups.fill(decay, logged[2].reshape(-1, *decay.shape[1:])).cumsum(2)
    rates = groups.fill(rate)
    # A logged token's u is known: its row of the system is that of the identity.
    known = groups.fill(rate[..., None] * value, logged[1].reshape(-1, num_values, value_dim))
    repeats = num_values // num_keys
    queries, keys = (each.repeat_interleave(repeats, 1) for each in (queries, keys))
    system = _pairs(rates[..., None] * keys, keys, decays)
    grown = decays.exp()
    solved = torch.linalg.solve_triangular(
        system, torch.cat([known, rates[..., None] * grown * keys], -1), upper=False, unitriangular=True
    )
    free, read = torch.split(solved, [value_dim, key_dim], -1)
    scores = _pairs(queries, keys, decays)
    to_end = (decays[:, :, -1:] - decays).exp() * keys
    whole = decays[:, :, -1].exp()[..., None]
    corrected = torch.empty_like(known)
    outputs = torch.empty_like(known)
    state = states[plan.sources]
    for requests, of_round, folded, kept, slots in plan.rounds:
        before = state[requests]
        corrected[of_round] = free[of_round] - read[of_round] @ before
        outputs[of_round] = (grown[of_round] * queries[of_round]) @ before + scores[of_round] @ corrected[of_round]
        if len(folded):
            of_folded = of_round[folded]
            after = whole[of_folded] * before[folded] + to_end[of_folded].transpose(-1, -2) @ corrected[of_folded]
            state[requests[folded]] = after
            states[slots] = after[kept]
    at = plan.groups[plan.new_tokens], plan.places[plan.new_tokens]
    new = [
        key[plan.new_tokens].flatten(1),
        corrected.transpose(1, 2)[at].flatten(1),
        decay[plan.new_tokens].flatten(1),
    ]
    log_tokens(log, torch.cat(new, -1), in_log, plan)
    return outputs.transpose(1, 2)[plan.groups, plan.places]


def _pairs(a: Tensor, keys: Tensor, decays: Tensor) -> Tensor:
    """Return the sums over channels of exp(c_t - c_i) a_t k_i for i <= t, else 0, [groups, heads, t, i]."""
    size = keys.shape[2]
    if decays.shape[3] == 1:
        above = torch.ones(size, size, dtype=torch.bool).triu(1)
        sums = decays[..., 0]
        return a @ keys.transpose(-1, -2) * (sums[..., None] - sums[..., None, :]).masked_fill(above, -torch.inf).exp()
    # One key at a time: all pairs at once would take the memory of the block's size times that of the keys.
    columns = [
        (a * keys[:, :, i : i + 1] * (decays - decays[:, :, i : i + 1]).clamp(max=0).exp()).sum(-1) for i in range(size)
    ]
    return torch.stack(columns, -1).tril()


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)

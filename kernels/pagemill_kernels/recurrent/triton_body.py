"""Triton kernel of recurrent layers for one token of each request, in one launch. `chunks.triton_body` has those for
steps of any size.

Logs and the last inputs of convolutions are rings: the value of position p is in place p modulo their places. So taking
tokens back, and a boundary that moves, change nothing in them. In a step of one token no place that a program reads is
written by another one; where requests have several tokens, `keep` writes what programs share behind the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(16)
"""Tokens of a block, in whose groups tokens are taken."""
LENGTH_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)). The series is exact to the last bit or two also where exp(x) is lost beside 1."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def if_all(condition, mask):
    """Return the mask, or none of it. The interpreter's scalars cannot be combined with masks."""
    return tl.where(condition, mask, False)


@triton.jit
def rows_of(requests_ptr, num_requests, request):
    """Return the row of a request (-1: one of padding), the slot of its state, and the tokens logged and computed."""
    at = requests_ptr + request
    row = tl.load(at).to(tl.int64)
    source = tl.load(at + num_requests).to(tl.int64)
    return row, source, tl.load(at + 2 * num_requests), tl.load(at + 3 * num_requests)


@triton.jit
def finish(
    o,
    tokens,
    mask,
    head,
    value,
    gates_ptr,
    gate_stride,
    norm_ptr,
    norm_stride,
    eps,
    VALUE_DIM: tl.constexpr,
    HAS_GATES: tl.constexpr,
    SIGMOID_GATES: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Gate and normalise outputs of one head, [tokens, VALUE_DIM]."""
    if HAS_GATES:
        at = gates_ptr + tokens[:, None] * gate_stride + head * VALUE_DIM + value[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        factor = sigmoid(gate)
        if not SIGMOID_GATES:
            factor *= gate
        if GATES_FIRST:
            o *= factor
    if HAS_NORM:
        o *= tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + head * norm_stride + value, mask=value < VALUE_DIM, other=0.0)
        o *= weight.to(tl.float32)[None, :]
    if HAS_GATES and not GATES_FIRST:
        o *= factor
    return o


@triton.jit
def convolved(
    x_ptr,
    taps_ptr,
    bias_ptr,
    window,
    ring,
    token,
    logged,
    computed,
    channel,
    mask,
    ring_places,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATED: tl.constexpr,
):
    """Return the convolution of a request's only token, and its input. x_ptr: of that token."""
    x = tl.load(x_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    out = x * tl.load(taps_ptr + (WIDTH - 1) * CHANNELS + channel, mask=mask, other=0.0)
    for tap in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - tap
        # Before the boundary lies the state's window, behind it are the ring's values.
        in_ring = logged >= back
        at = ring + (computed + ring_places - back) % ring_places * CHANNELS + channel
        before = tl.load(at, mask=if_all(in_ring, mask), other=0.0)
        at = window + (tap + logged) * CHANNELS + channel
        before += tl.load(at, mask=if_all(logged < back, mask), other=0.0)
        out += before * tl.load(taps_ptr + tap * CHANNELS + channel, mask=mask, other=0.0)
    if HAS_BIAS:
        out += tl.load(bias_ptr + channel, mask=mask, other=0.0)
    if ACTIVATED:
        out *= sigmoid(out)
    return out, x


@triton.jit
def folded(
    state,
    log,
    log_places,
    first,
    log_key,
    log_u,
    log_decay,
    key,
    value,
    num,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LOG_VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Return some channels of a state behind `num` further logged tokens, the first at position `first`."""
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    for n in range(num):
        entry = log + (first + n) % log_places * LOG_VALUES
        k = tl.load(entry + log_key + key, mask=is_key, other=0.0)
        u = tl.load(entry + log_u + value, mask=is_value, other=0.0)
        if BY_CHANNEL:
            grown = tl.exp(tl.load(entry + log_decay + key, mask=is_key, other=0.0))[:, None]
        else:
            grown = tl.exp(tl.load(entry + log_decay))
        state = state * grown + k[:, None] * u[None, :]
    return state


@triton.jit
def store_state(at, stride, state, mask, number, first_write, last_write, writes_ptr):
    """Store the state behind so many blocks, if it is kept."""
    for write in range(first_write, last_write):
        if tl.load(writes_ptr + 2 * write) == number:
            slot = tl.load(writes_ptr + 2 * write + 1).to(tl.int64)
            tl.store(at + slot * stride, state, mask=mask)


@triton.jit
def keep_inputs(
    ring,
    ring_places,
    windows_ptr,
    window_stride,
    computed,
    logged,
    row,
    channel,
    mask,
    x,
    first_write,
    last_write,
    writes_ptr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write some channels of the windows of states behind a request's only token, or before it, and of its input x."""
    for write in range(first_write, last_write):
        behind = tl.load(writes_ptr + 2 * write) * GROUP - logged
        to = windows_ptr + tl.load(writes_ptr + 2 * write + 1).to(tl.int64) * window_stride
        for back in tl.static_range(1, WIDTH):
            at = ring + (computed + behind + 2 * ring_places - back) % ring_places * CHANNELS + channel
            before = tl.load(at, mask=if_all(behind < back, mask), other=0.0)
            tl.store(to + (WIDTH - 1 - back) * CHANNELS + channel, tl.where(behind >= back, x, before), mask=mask)
    tl.store(ring + computed % ring_places * CHANNELS + channel, x, mask=if_all(row >= 0, mask))


@triton.jit(do_not_specialize=["num_requests", "ring_places", "log_places"])
def step(
    x_ptr,
    x_stride,
    taps_ptr,
    bias_ptr,
    windows_ptr,
    window_stride,
    inputs_ptr,
    ring_places,
    rates_ptr,
    rate_stride,
    steps_ptr,
    step_stride,
    gates_ptr,
    gate_stride,
    decays_ptr,
    biases_ptr,
    skips_ptr,
    norm_ptr,
    norm_stride,
    eps,
    rate_scale,
    least_step,
    most_step,
    states_ptr,
    state_stride,
    log_ptr,
    log_places,
    out_ptr,
    query_start_ptr,
    requests_ptr,
    num_requests,
    write_starts_ptr,
    writes_ptr,
    QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    LOG_VALUES: tl.constexpr,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_GATES: tl.constexpr,
    SIGMOID_GATES: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FINISHES: tl.constexpr,
):
    """Compute the only token of a request for one value head: convolution, rule, gate and norm.

    The state is read once, some channels of keys at a time; keys and queries get their lengths at the end. It is
    written only behind a token that completes a block. Blocks that accepted tokens completed since the last step are
    folded before.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_ptr + request).to(tl.int64)
    if tl.load(query_start_ptr + request + 1) == token:
        return
    row, source, logged, computed = rows_of(requests_ptr, num_requests, request)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    i, value = tl.arange(0, GROUP), tl.arange(0, VALUE_PAD)
    is_value = value < VALUE_DIM
    ring, window = inputs_ptr + row * ring_places * CHANNELS, windows_ptr + source * window_stride
    x = x_ptr + token * x_stride
    log = log_ptr + row * log_places * LOG_VALUES
    log_key = key_head * KEY_DIM
    log_u = NUM_KEYS * KEY_DIM + head * VALUE_DIM
    log_decay = NUM_KEYS * KEY_DIM + NUM_VALUES * VALUE_DIM + head * (KEY_DIM if BY_CHANNEL else 1)
    first_write, last_write = tl.load(write_starts_ptr + request), tl.load(write_starts_ptr + request + 1)
    boundary = computed - logged
    num_whole = logged // GROUP
    num = logged - num_whole * GROUP
    entry = log + (boundary + num_whole * GROUP + i) % log_places * LOG_VALUES
    is_logged = i < num

    factor = tl.load(decays_ptr + head)
    if not BY_CHANNEL:
        stepped = tl.load(steps_ptr + token * step_stride + head).to(tl.float32) + tl.load(biases_ptr + head)
        size = tl.minimum(tl.maximum(softplus(stepped), least_step), most_step)
        decay = factor * size
        decays = tl.load(entry + log_decay, mask=is_logged, other=0.0)
        whole = tl.sum(decays, 0) + decay
        weights = tl.exp(tl.minimum(whole - tl.cumsum(decays, 0), 0.0))
        grown = tl.exp(whole)

    by_key, by_query = tl.zeros([VALUE_PAD], tl.float32), tl.zeros([VALUE_PAD], tl.float32)
    of_keys, of_queries = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP], tl.float32)
    squares = tl.zeros([KEY_BLOCK], tl.float32)
    query_squares, both = tl.zeros([KEY_BLOCK], tl.float32), tl.zeros([KEY_BLOCK], tl.float32)
    for first in range(0, KEY_DIM, KEY_BLOCK):
        key = first + tl.arange(0, KEY_BLOCK)
        is_key = key < KEY_DIM
        at = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
        state = tl.load(states_ptr + source * state_stride + at, mask=is_key[:, None] & is_value[None, :], other=0.0)
        at = QUERY_AT + key_head * KEY_DIM + key
        q, _ = convolved(x, taps_ptr, bias_ptr, window, ring, token, logged, computed, at, is_key, ring_places,
                         CHANNELS, WIDTH, HAS_BIAS, True)  # fmt: skip
        at = KEY_AT + key_head * KEY_DIM + key
        k, _ = convolved(x, taps_ptr, bias_ptr, window, ring, token, logged, computed, at, is_key, ring_places,
                         CHANNELS, WIDTH, HAS_BIAS, True)  # fmt: skip
        state = folded(state, log, log_places, boundary, log_key, log_u, log_decay, key, value, num_whole * GROUP,
                       KEY_DIM, VALUE_DIM, LOG_VALUES, BY_CHANNEL)  # fmt: skip
        mask = is_logged[:, None] & is_key[None, :]
        keys = tl.load(entry[:, None] + log_key + key[None, :], mask=mask, other=0.0)
        if BY_CHANNEL:
            at = head * KEY_DIM + key
            stepped = tl.load(steps_ptr + token * step_stride + at, mask=is_key, other=0.0).to(tl.float32)
            decay = tl.where(is_key, factor * softplus(stepped + tl.load(biases_ptr + at, mask=is_key, other=0.0)), 0.0)
            decays = tl.load(entry[:, None] + log_decay + key[None, :], mask=mask, other=0.0)
            whole = tl.sum(decays, 0) + decay
            keys *= tl.exp(tl.minimum(whole[None, :] - tl.cumsum(decays, 0), 0.0))
            tl.store(log + computed % log_places * LOG_VALUES + log_decay + key, decay, mask=if_all(row >= 0, is_key))
            state *= tl.exp(whole)[:, None]
        by_key += tl.sum(state * k[:, None], 0)
        by_query += tl.sum(state * q[:, None], 0)
        of_keys += tl.sum(keys * k[None, :], 1)
        of_queries += tl.sum(keys * q[None, :], 1)
        squares += k * k
        query_squares += q * q
        both += q * k
    if not BY_CHANNEL:
        by_key, by_query = by_key * grown, by_query * grown
        of_keys, of_queries = of_keys * weights, of_queries * weights

    at_value = VALUE_AT + head * VALUE_DIM + value
    v, x_v = convolved(x, taps_ptr, bias_ptr, window, ring, token, logged, computed, at_value, is_value, ring_places,
                       CHANNELS, WIDTH, HAS_BIAS, True)  # fmt: skip
    mask = is_logged[:, None] & is_value[None, :]
    us = tl.load(entry[:, None] + log_u + value[None, :], mask=mask, other=0.0)
    by_key += tl.sum(of_keys[:, None] * us, 0)
    o = by_query + tl.sum(of_queries[:, None] * us, 0)
    if DELTA:
        length = tl.rsqrt(tl.sum(squares, 0) + LENGTH_EPS)
        rate = rate_scale * sigmoid(tl.load(rates_ptr + token * rate_stride + head).to(tl.float32))
        u = rate * (v - length * by_key)
        o += tl.sum(both, 0) * length * u
        o *= tl.rsqrt(tl.sum(query_squares, 0) + LENGTH_EPS) * KEY_DIM**-0.5
    else:
        length = 1.0
        u = size * v
        o += tl.sum(both, 0) * u + tl.load(skips_ptr + head) * v
    if FINISHES:
        o = finish(
            o[None, :], tl.zeros([1], tl.int64) + token, is_value[None, :], head, value, gates_ptr, gate_stride,
            norm_ptr, norm_stride, eps, VALUE_DIM, HAS_GATES, SIGMOID_GATES, GATES_FIRST, HAS_NORM,
        )  # fmt: skip
    else:
        o = o[None, :]
    at = out_ptr + (token * NUM_VALUES + head) * VALUE_DIM + value
    tl.store(at[None, :], o, mask=is_value[None, :])

    place = log + computed % log_places * LOG_VALUES
    tl.store(place + log_u + value, u, mask=if_all(row >= 0, is_value))
    if not BY_CHANNEL:
        tl.store(place + log_decay, decay, mask=row >= 0)
    keep_inputs(ring, ring_places, windows_ptr, window_stride, computed, logged, row, at_value, is_value, x_v,
                first_write, last_write, writes_ptr, CHANNELS, WIDTH)  # fmt: skip
    for first in range(0, KEY_DIM, KEY_BLOCK):
        key = first + tl.arange(0, KEY_BLOCK)
        is_key = key < KEY_DIM
        at_key = KEY_AT + key_head * KEY_DIM + key
        k, x_k = convolved(x, taps_ptr, bias_ptr, window, ring, token, logged, computed, at_key, is_key, ring_places,
                           CHANNELS, WIDTH, HAS_BIAS, True)  # fmt: skip
        k *= length
        tl.store(place + log_key + key, k, mask=if_all(row >= 0, is_key))
        at_query = QUERY_AT + key_head * KEY_DIM + key
        x_q = tl.load(x + at_query, mask=is_key, other=0.0).to(tl.float32)
        if first_write < last_write:
            of_state = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
            is_state = is_key[:, None] & is_value[None, :]
            state = tl.load(states_ptr + source * state_stride + of_state, mask=is_state, other=0.0)
            for group in range(num_whole):
                state = folded(state, log, log_places, boundary + group * GROUP, log_key, log_u, log_decay, key, value,
                               GROUP, KEY_DIM, VALUE_DIM, LOG_VALUES, BY_CHANNEL)  # fmt: skip
                store_state(states_ptr + of_state, state_stride, state, is_state, group + 1, first_write, last_write,
                            writes_ptr)  # fmt: skip
            if num + 1 == GROUP:
                state = folded(state, log, log_places, boundary + num_whole * GROUP, log_key, log_u, log_decay, key,
                               value, num, KEY_DIM, VALUE_DIM, LOG_VALUES, BY_CHANNEL)  # fmt: skip
                if BY_CHANNEL:
                    at_step = head * KEY_DIM + key
                    stepped = tl.load(steps_ptr + token * step_stride + at_step, mask=is_key, other=0.0).to(tl.float32)
                    stepped += tl.load(biases_ptr + at_step, mask=is_key, other=0.0)
                    state *= tl.exp(tl.where(is_key, factor * softplus(stepped), 0.0))[:, None]
                else:
                    state *= tl.exp(decay)
                state += k[:, None] * u[None, :]
                store_state(states_ptr + of_state, state_stride, state, is_state, num_whole + 1, first_write,
                            last_write, writes_ptr)  # fmt: skip
        keep_inputs(ring, ring_places, windows_ptr, window_stride, computed, logged, row, at_key, is_key, x_k,
                    first_write, last_write, writes_ptr, CHANNELS, WIDTH)  # fmt: skip
        keep_inputs(ring, ring_places, windows_ptr, window_stride, computed, logged, row, at_query, is_key, x_q,
                    first_write, last_write, writes_ptr, CHANNELS, WIDTH)  # fmt: skip

"""Triton kernels of recurrent layers for steps of any size: the convolution, the rule in groups of tokens, what the
next step reads, gates and norms. `recurrent.triton_body` has the layout of logs and inputs, and steps of one token."""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.recurrent.triton_body import (
    GROUP,
    LENGTH_EPS,
    convolved,
    finish,
    if_all,
    rows_of,
    sigmoid,
    softplus,
    store_state,
)

PRODUCTS: tl.constexpr = tl.constexpr("tf32x3")
"""Products of parts of float32 values on tensor cores, which keep their bits but for the last two or three."""


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "ring_places"])
def convolve(
    x_ptr,
    x_stride,
    taps_ptr,
    bias_ptr,
    windows_ptr,
    window_stride,
    inputs_ptr,
    ring_places,
    out_ptr,
    num_tokens,
    token_requests_ptr,
    query_start_ptr,
    requests_ptr,
    num_requests,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve some channels of some tokens; windows and rings are only read."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    request = tl.load(token_requests_ptr + token, mask=is_token, other=0)
    is_token = is_token & (request < num_requests)
    request = tl.minimum(request, num_requests - 1)
    row, source, logged, computed = rows_of(requests_ptr, num_requests, request)
    index = (token - tl.load(query_start_ptr + request)).to(tl.int32)
    ring, window = inputs_ptr + row * ring_places * CHANNELS, windows_ptr + source * window_stride
    is_channel = channel < CHANNELS
    mask = is_token[:, None] & is_channel[None, :]
    out = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + channel, mask=is_channel, other=0.0)[None, :]
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        here = index >= back
        at = x_ptr + (token - back)[:, None] * x_stride + channel[None, :]
        before = tl.load(at, mask=mask & here[:, None], other=0.0).to(tl.float32)
        since = logged + index - back
        at = (ring + (computed + index + ring_places - back) % ring_places * CHANNELS)[:, None] + channel[None, :]
        before += tl.load(at, mask=mask & (~here & (since >= 0))[:, None], other=0.0)
        at = (window + (WIDTH - 1 + since) * CHANNELS)[:, None] + channel[None, :]
        before += tl.load(at, mask=mask & (~here & (since < 0))[:, None], other=0.0)
        out += before * tl.load(taps_ptr + tap * CHANNELS + channel, mask=is_channel, other=0.0)[None, :]
    if ACTIVATED:
        out *= sigmoid(out)
    tl.store(out_ptr + token[:, None] * CHANNELS + channel[None, :], out, mask=mask)


@triton.jit
def solved(system, i):
    """Return the inverse of 1 + system, which has zeros on and above its diagonal, row by row."""
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for t in range(1, GROUP):
        of_row = tl.sum(tl.where(i[:, None] == t, system, 0.0), 0)
        row = (i == t).to(tl.float32) - tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == t, row[None, :], inverse)
    return inverse


@triton.jit
def pairs(a, keys, sums, i, BY_CHANNEL: tl.constexpr):
    """Return the sums over channels of exp(c_t - c_i) a_t k_i, [t, i]; meaningless above the diagonal."""
    if BY_CHANNEL:
        out = tl.zeros([GROUP, GROUP], tl.float32)
        for n in range(GROUP):
            chosen = i[:, None] == n
            key = tl.sum(tl.where(chosen, keys, 0.0), 0)
            before = tl.sum(tl.where(chosen, sums, 0.0), 0)
            column = tl.sum(a * key[None, :] * tl.exp(tl.minimum(sums - before[None, :], 0.0)), 1)
            out = tl.where(i[None, :] == n, column[:, None], out)
        return out
    else:
        grown = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        return tl.dot(a, tl.trans(keys), input_precision=PRODUCTS) * grown


@triton.jit(do_not_specialize=["num_requests", "ring_places", "log_places"])
def chunk(
    x_ptr,
    rates_ptr,
    rate_stride,
    steps_ptr,
    step_stride,
    decays_ptr,
    biases_ptr,
    skips_ptr,
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
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_VALUES: tl.constexpr,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Compute all tokens of a request for some values of one head, a group at a time. x: convolved, contiguous."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_start_ptr + request)
    count = tl.load(query_start_ptr + request + 1) - start
    if count == 0:
        return
    row, source, logged, computed = rows_of(requests_ptr, num_requests, request)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    i, key, value = tl.arange(0, GROUP), tl.arange(0, KEY_PAD), tl.arange(0, VALUE_BLOCK)
    value += tl.program_id(2) * VALUE_BLOCK
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    is_state = is_key[:, None] & is_value[None, :]
    of_head = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(states_ptr + source * state_stride + of_head, mask=is_state, other=0.0)
    factor = tl.load(decays_ptr + head)
    log = log_ptr + row * log_places * LOG_VALUES
    log_u = NUM_KEYS * KEY_DIM + head * VALUE_DIM
    log_decay = NUM_KEYS * KEY_DIM + NUM_VALUES * VALUE_DIM + head * (KEY_DIM if BY_CHANNEL else 1)
    first_write, last_write = tl.load(write_starts_ptr + request), tl.load(write_starts_ptr + request + 1)
    kept = 0
    if first_write < last_write:
        kept = tl.load(writes_ptr + 2 * last_write - 2) * GROUP
    if BY_CHANNEL:
        biases = tl.load(biases_ptr + head * KEY_DIM + key, mask=is_key, other=0.0)
    else:
        bias = tl.load(biases_ptr + head)
    boundary = computed - logged
    for group in range(tl.cdiv(logged + count, GROUP)):
        since = group * GROUP + i
        is_logged = since < logged
        is_new = (since >= logged) & (since < logged + count)
        token = (start + since - logged).to(tl.int64)
        entry = log + (boundary + since) % log_places * LOG_VALUES
        new_keys = is_new[:, None] & is_key[None, :]
        old_keys = is_logged[:, None] & is_key[None, :]
        new_values = is_new[:, None] & is_value[None, :]
        x = (x_ptr + token * CHANNELS)[:, None]
        q = tl.load(x + QUERY_AT + key_head * KEY_DIM + key[None, :], mask=new_keys, other=0.0)
        k = tl.load(x + KEY_AT + key_head * KEY_DIM + key[None, :], mask=new_keys, other=0.0)
        v = tl.load(x + VALUE_AT + head * VALUE_DIM + value[None, :], mask=new_values, other=0.0)
        if DELTA:
            q *= (tl.rsqrt(tl.sum(q * q, 1) + LENGTH_EPS) * KEY_DIM**-0.5)[:, None]
            k *= tl.rsqrt(tl.sum(k * k, 1) + LENGTH_EPS)[:, None]
            rate = rate_scale * sigmoid(
                tl.load(rates_ptr + token * rate_stride + head, mask=is_new, other=0.0).to(tl.float32)
            )
            rate = tl.where(is_new, rate, 0.0)
        if BY_CHANNEL:
            at = (steps_ptr + token * step_stride + head * KEY_DIM)[:, None] + key[None, :]
            stepped = tl.load(at, mask=new_keys, other=0.0).to(tl.float32) + biases[None, :]
            decay = tl.where(new_keys, factor * softplus(stepped), 0.0)
            sums = decay + tl.load(entry[:, None] + log_decay + key[None, :], mask=old_keys, other=0.0)
        else:
            stepped = tl.load(steps_ptr + token * step_stride + head, mask=is_new, other=0.0).to(tl.float32) + bias
            size = tl.minimum(tl.maximum(softplus(stepped), least_step), most_step)
            decay = tl.where(is_new, factor * size, 0.0)
            sums = decay + tl.load(entry + log_decay, mask=is_logged, other=0.0)
        whole = tl.sum(sums, 0)
        sums = tl.cumsum(sums, 0)
        keys = k + tl.load(entry[:, None] + key_head * KEY_DIM + key[None, :], mask=old_keys, other=0.0)
        known = tl.load(entry[:, None] + log_u + value[None, :], mask=is_logged[:, None] & is_value[None, :], other=0.0)
        grown = tl.exp(sums) if BY_CHANNEL else tl.exp(sums)[:, None]
        if DELTA:
            system = tl.where(i[:, None] > i[None, :], pairs(rate[:, None] * k, keys, sums, i, BY_CHANNEL), 0.0)
            read = tl.dot(rate[:, None] * grown * k, state, input_precision=PRODUCTS)
            # A logged token's u is known: its row of the system is that of the identity.
            u = tl.dot(solved(system, i), known + rate[:, None] * v - read, input_precision=PRODUCTS)
        else:
            u = known + tl.where(new_values, size[:, None] * v, 0.0)
        scores = tl.where(i[:, None] >= i[None, :], pairs(q, keys, sums, i, BY_CHANNEL), 0.0)
        o = tl.dot(grown * q, state, input_precision=PRODUCTS) + tl.dot(scores, u, input_precision=PRODUCTS)
        if not DELTA:
            o += tl.load(skips_ptr + head) * v
        at = out_ptr + (token[:, None] * NUM_VALUES + head) * VALUE_DIM + value[None, :]
        tl.store(at, o, mask=new_values)
        tl.debug_barrier()
        is_kept = if_all(row >= 0, is_new & (since >= kept))
        tl.store(entry[:, None] + log_u + value[None, :], u, mask=is_kept[:, None] & is_value[None, :])
        is_kept = if_all(tl.program_id(2) == 0, is_kept)
        if BY_CHANNEL:
            tl.store(entry[:, None] + log_decay + key[None, :], decay, mask=is_kept[:, None] & is_key[None, :])
        else:
            tl.store(entry + log_decay, decay, mask=is_kept)
        if (group + 1) * GROUP <= logged + count:
            if BY_CHANNEL:
                to_end = keys * tl.exp(tl.minimum(whole[None, :] - sums, 0.0))
                state = state * tl.exp(whole)[:, None]
            else:
                to_end = keys * tl.exp(tl.minimum(whole - sums, 0.0))[:, None]
                state = state * tl.exp(whole)
            state += tl.dot(tl.trans(to_end), u, input_precision=PRODUCTS)
            store_state(states_ptr + of_head, state_stride, state, is_state, group + 1, first_write, last_write,
                        writes_ptr)  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "ring_places", "log_places"])
def keep(
    x_ptr,
    x_stride,
    taps_ptr,
    bias_ptr,
    windows_ptr,
    window_stride,
    inputs_ptr,
    ring_places,
    convolved_ptr,
    log_ptr,
    log_places,
    query_start_ptr,
    requests_ptr,
    num_requests,
    write_starts_ptr,
    writes_ptr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    CONVOLVES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    KEY_AT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    LOG_VALUES: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Write the windows and last inputs of some channels of a request, or the logged keys of one of its key heads.

    With CONVOLVES each request has one token, which is convolved as well.
    """
    request = tl.program_id(0)
    part = tl.program_id(1)
    start = tl.load(query_start_ptr + request).to(tl.int64)
    count = (tl.load(query_start_ptr + request + 1) - start).to(tl.int32)
    if count == 0:
        return
    row, source, logged, computed = rows_of(requests_ptr, num_requests, request)
    first_write, last_write = tl.load(write_starts_ptr + request), tl.load(write_starts_ptr + request + 1)
    if part < NUM_BLOCKS:
        channel = part * BLOCK + tl.arange(0, BLOCK)
        is_channel = channel < CHANNELS
        ring = inputs_ptr + row * ring_places * CHANNELS
        if CONVOLVES:
            out, _ = convolved(
                x_ptr + start * x_stride, taps_ptr, bias_ptr, windows_ptr + source * window_stride, ring, start, logged,
                computed, channel, is_channel, ring_places, CHANNELS, WIDTH, HAS_BIAS, ACTIVATED,
            )  # fmt: skip
            tl.store(convolved_ptr + start * CHANNELS + channel, out, mask=is_channel)
        for write in range(first_write, last_write):
            behind = tl.load(writes_ptr + 2 * write) * GROUP - logged
            to = windows_ptr + tl.load(writes_ptr + 2 * write + 1).to(tl.int64) * window_stride
            for back in tl.static_range(1, WIDTH):
                is_here = behind >= back
                at = x_ptr + (start + behind - back) * x_stride + channel
                values = tl.load(at, mask=if_all(is_here, is_channel), other=0.0).to(tl.float32)
                at = ring + (computed + behind + 2 * ring_places - back) % ring_places * CHANNELS + channel
                values += tl.load(at, mask=if_all(behind < back, is_channel), other=0.0)
                tl.store(to + (WIDTH - 1 - back) * CHANNELS + channel, values, mask=is_channel)
        tl.debug_barrier()
        for index in range(tl.maximum(count - ring_places, 0), count):
            values = tl.load(x_ptr + (start + index) * x_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
            tl.store(
                ring + (computed + index) % ring_places * CHANNELS + channel, values, mask=if_all(row >= 0, is_channel)
            )
    else:
        key_head = part - NUM_BLOCKS
        key = tl.arange(0, KEY_PAD)
        kept = 0
        if first_write < last_write:
            kept = tl.load(writes_ptr + 2 * last_write - 2) * GROUP
        for first in range(tl.maximum(kept - logged, 0), count, GROUP):
            index = first + tl.arange(0, GROUP)
            mask = if_all(row >= 0, index < count)[:, None] & (key < KEY_DIM)[None, :]
            at = convolved_ptr + (start + index)[:, None] * CHANNELS + KEY_AT + key_head * KEY_DIM + key[None, :]
            k = tl.load(at, mask=mask, other=0.0)
            if DELTA:
                k *= tl.rsqrt(tl.sum(k * k, 1) + LENGTH_EPS)[:, None]
            place = (row * log_places + (computed + index) % log_places) * LOG_VALUES + key_head * KEY_DIM
            tl.store((log_ptr + place)[:, None] + key[None, :], k, mask=mask)


@triton.jit(do_not_specialize=["eps"])
def finish_parts(
    out_ptr,
    gates_ptr,
    gate_stride,
    norm_ptr,
    norm_stride,
    eps,
    NUM_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HAS_GATES: tl.constexpr,
    SIGMOID_GATES: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Gate and normalise one part of one token's outputs in place."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    value = tl.arange(0, PAD)
    mask = (value < SIZE)[None, :]
    at = (out_ptr + (token * NUM_PARTS + part) * SIZE + value)[None, :]
    o = finish(
        tl.load(at, mask=mask, other=0.0), tl.zeros([1], tl.int64) + token, mask, part, value, gates_ptr, gate_stride,
        norm_ptr, norm_stride, eps, SIZE, HAS_GATES, SIGMOID_GATES, GATES_FIRST, HAS_NORM,
    )  # fmt: skip
    tl.store(at, o, mask=mask)

"""Triton kernels of the rows: changes of rows, a step's inputs, and the step's end, each in one launch.

The key of a draw is that of `sampling.randomness`, operation by operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.request_rows import layout

RECORD: tl.constexpr = tl.constexpr(layout.RECORD)
NUM_TOKENS: tl.constexpr = tl.constexpr(layout.NUM_TOKENS)
NUM_PROMPT_TOKENS: tl.constexpr = tl.constexpr(layout.NUM_PROMPT_TOKENS)
NUM_COMPUTED_TOKENS: tl.constexpr = tl.constexpr(layout.NUM_COMPUTED_TOKENS)
CHOICE: tl.constexpr = tl.constexpr(layout.CHOICE)
SEED_LOW: tl.constexpr = tl.constexpr(layout.SEED_LOW)
SEED_HIGH: tl.constexpr = tl.constexpr(layout.SEED_HIGH)
DRAW: tl.constexpr = tl.constexpr(layout.DRAW)
NUM_COPIED: tl.constexpr = tl.constexpr(layout.NUM_FIELDS - layout.DRAW)
"""Number of settings that are copied from the record; the key's two halves follow them."""


@triton.jit(do_not_specialize=["num_pieces"])
def write(pieces_ptr, num_pieces, values_ptr, state_ptr, PIECE: tl.constexpr):
    """Write one piece: state[to + n] = values[from + n]."""
    piece = pieces_ptr + tl.program_id(0)
    to = tl.load(piece)
    source = tl.load(piece + num_pieces)
    count = tl.load(piece + 2 * num_pieces)
    n = tl.arange(0, PIECE)
    mask = n < count
    tl.store(state_ptr + to + n, tl.load(values_ptr + source + n, mask=mask, other=0), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_sampled", "table_width", "tokens_width", "tables_stride", "slots_stride", "tables_out_stride"
    ]
)  # fmt: skip
def build(
    rows_ptr,
    query_start_ptr,
    sample_start_ptr,
    num_sampled,
    records_ptr,
    tables_ptr,
    table_width,
    tables_stride,
    tokens_ptr,
    tokens_width,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    slots_stride,
    query_start_out_ptr,
    seq_lens_ptr,
    tables_out_ptr,
    tables_out_stride,
    last_tokens_ptr,
    settings_ptr,
    NUM_KINDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Build some tokens of one request and a part of its block tables; the request's first program does the rest.

    Strides are from one kind to the next; with one kind none is read.
    """
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    record = records_ptr + row * RECORD
    computed = tl.load(record + NUM_COMPUTED_TOKENS)
    seq_len = computed + end - start

    n = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = n < end - start
    position = computed + n
    token = tl.load(tokens_ptr + row * tokens_width + position, mask=mask, other=0)
    at = (start + n).to(tl.int64)
    tl.store(token_ids_ptr + at, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + at, position.to(tl.int64), mask=mask)

    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    for kind in tl.static_range(NUM_KINDS):
        table = tables_ptr + row * table_width
        slots = slots_ptr + at
        table_out = tables_out_ptr + request.to(tl.int64) * table_width
        if kind > 0:
            table += kind * tables_stride
            slots += kind * slots_stride
            table_out += kind * tables_out_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        tl.store(slots, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
        for first in range(chunk * BLOCK, num_blocks, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            is_block = index < num_blocks
            tl.store(table_out + index, tl.load(table + index, mask=is_block, other=0), mask=is_block)

    if chunk == 0:
        tl.store(seq_lens_ptr + request, seq_len)
        tl.store(query_start_out_ptr + request + 1, end)
        if request == 0:
            tl.store(query_start_out_ptr, start)
        first = tl.load(sample_start_ptr + request)
        last = tl.load(sample_start_ptr + request + 1)
        for place in range(first, last):
            tl.store(last_tokens_ptr + place, (end - (last - place)).to(tl.int64))
            settings = settings_ptr + place
            for i in tl.static_range(NUM_COPIED):
                tl.store(settings + i * num_sampled, tl.load(record + DRAW + i))
            low, high = key_of(record, place - first)
            tl.store(settings + NUM_COPIED * num_sampled, low)
            tl.store(settings + (NUM_COPIED + 1) * num_sampled, high)


@triton.jit(do_not_specialize=["num_requests", "padding_row", "tokens_width"])
def advance(
    rows_ptr,
    query_start_ptr,
    sample_start_ptr,
    num_requests,
    padding_row,
    sampled_ptr,
    records_ptr,
    tokens_ptr,
    tokens_width,
    BLOCK: tl.constexpr,
):
    """Count the step's tokens as computed, without proposed ones that were not sampled, and append the sampled ones.

    A failed one (-1) is appended as token 0.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_requests
    row = tl.load(rows_ptr + i, mask=mask, other=0).to(tl.int64)
    mask = mask & (row != padding_row)
    count = tl.load(query_start_ptr + i + 1, mask=mask, other=0) - tl.load(query_start_ptr + i, mask=mask, other=0)
    first = tl.load(sample_start_ptr + i, mask=mask, other=0)
    num_proposed = tl.load(sample_start_ptr + i + 1, mask=mask, other=0) - first - 1
    length = records_ptr + row * RECORD + NUM_TOKENS
    num_tokens = tl.load(length, mask=mask, other=0)
    tokens = tokens_ptr + row * tokens_width + num_tokens

    num_accepted = tl.zeros_like(num_proposed)
    going = num_proposed > 0
    for n in range(tl.max(num_proposed, axis=0)):
        going = going & (n < num_proposed)
        sampled = tl.load(sampled_ptr + first + n, mask=going, other=-1)
        going = going & (sampled == tl.load(tokens + n, mask=going, other=-1))
        num_accepted += going.to(tl.int32)

    computed = records_ptr + row * RECORD + NUM_COMPUTED_TOKENS
    count -= tl.maximum(num_proposed, 0) - num_accepted
    tl.store(computed, tl.load(computed, mask=mask, other=0) + count, mask=mask)
    mask = mask & (num_proposed >= 0)
    sampled = tl.load(sampled_ptr + first + num_accepted, mask=mask, other=0)
    tl.store(tokens + num_accepted, tl.maximum(sampled, 0).to(tl.int32), mask=mask)
    tl.store(length, num_tokens + num_accepted + 1, mask=mask)


@triton.jit
def key_of(record, offset):
    """Return both halves of the 64 bits that determine a draw of the row, as int32: of the next one, or `offset`
    further."""
    low = tl.load(record + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = tl.load(record + NUM_TOKENS) - tl.load(record + NUM_PROMPT_TOKENS) + offset
    key = mix64((high << 32) | low)
    key = mix64(key + tl.load(record + CHOICE).to(tl.uint64))
    key = mix64(key + position.to(tl.uint64))
    return key.to(tl.uint32).to(tl.int32, bitcast=True), (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def mix64(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)

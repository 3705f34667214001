"""Triton kernels of sampling: changes of logits, the filtered draw in one program per row, log probabilities.

The arithmetic is that of `arithmetic`, `filters` and `randomness`, operation by operation; launchers disable fused
multiply-adds, which would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.sampling import arithmetic
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES

TEMPERATURE: tl.constexpr = tl.constexpr(DRAWS.index("temperature"))
TOP_K: tl.constexpr = tl.constexpr(DRAWS.index("top_k"))
TOP_P: tl.constexpr = tl.constexpr(DRAWS.index("top_p"))
MIN_P: tl.constexpr = tl.constexpr(DRAWS.index("min_p"))
KEY_LOW: tl.constexpr = tl.constexpr(len(DRAWS))
KEY_HIGH: tl.constexpr = tl.constexpr(len(DRAWS) + 1)
PROPOSED: tl.constexpr = tl.constexpr(2)
REPETITION: tl.constexpr = tl.constexpr(3 + PENALTIES.index("repetition_penalty"))
FREQUENCY: tl.constexpr = tl.constexpr(3 + PENALTIES.index("frequency_penalty"))
PRESENCE: tl.constexpr = tl.constexpr(3 + PENALTIES.index("presence_penalty"))
LN2: tl.constexpr = tl.constexpr(arithmetic.LN2)
LOG2E: tl.constexpr = tl.constexpr(arithmetic.LOG2E)
REACH: tl.constexpr = tl.constexpr(arithmetic.REACH)
LOG_SERIES: tl.constexpr = tl.constexpr(arithmetic.LOG_SERIES)
POWER_SERIES: tl.constexpr = tl.constexpr(arithmetic.POWER_SERIES)
SQRT_HALF_BITS: tl.constexpr = tl.constexpr(arithmetic.SQRT_HALF_BITS)
MASS_BIAS: tl.constexpr = tl.constexpr(127 + arithmetic.MASS_BITS)
MASS_UNIT: tl.constexpr = tl.constexpr(2.0**-arithmetic.MASS_BITS)
SHARE_BITS: tl.constexpr = tl.constexpr(arithmetic.SHARE_BITS)
WHOLE_SHARE: tl.constexpr = tl.constexpr(arithmetic.WHOLE_SHARE)
LAST_KEY: tl.constexpr = tl.constexpr(0x41CFFFFF)
"""Key of the least likely token that can be drawn, one below that of REACH.

A key is the bits of -x as an integer: it grows as tokens become less likely.
"""
PIVOTS: tl.constexpr = tl.constexpr(8)
"""Keys with which one pass over a row compares."""
FIRST_PIVOTS: tl.constexpr = tl.constexpr(4)
"""Keys with which the first pass over a row compares."""
LIST_PADDING: tl.constexpr = tl.constexpr(32)
"""Padding behind a list, whose first element is the number of tokens: lists of two rows share no cache line."""
NEGATIVE_INFINITY: tl.constexpr = tl.constexpr(-(1 << 23))
"""Bits of -inf as an integer."""
UNIT: tl.constexpr = tl.constexpr(2.0**-32)
ALMOST_ONE: tl.constexpr = tl.constexpr(1 - 2.0**-24)


@triton.jit(do_not_specialize=["num_edits"])
def edit(edits_ptr, num_edits, logits_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Compute logits[row, token] += bias.

    edits: int32 [3, num_edits]: rows, tokens and the bits of biases.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_edits
    row = tl.load(edits_ptr + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(edits_ptr + num_edits + i, mask=mask, other=0)
    bias = tl.load(edits_ptr + 2 * num_edits + i, mask=mask, other=0).to(tl.float32, bitcast=True)
    at = logits_ptr + row * VOCAB + token
    tl.store(at, tl.load(at, mask=mask, other=0.0) + bias, mask=mask)


@triton.jit(do_not_specialize=["num_words", "first"])
def forbid(rows_ptr, bits_ptr, num_words, first, logits_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Set the logits of a piece of one row to -inf for every token without a bit. bits: int32 [masks, num_words];
    first: the bit of the first column."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    words = bits_ptr + tl.program_id(0).to(tl.int64) * num_words
    bit = first + token
    word = tl.load(words + bit // 32, mask=mask, other=-1)
    is_forbidden = (word >> (bit % 32)) & 1 == 0
    tl.store(logits_ptr + row * VOCAB + token, float("-inf"), mask=mask & is_forbidden)


@triton.jit(do_not_specialize=["num_penalised", "first"])
def penalise(
    penalties_ptr, num_penalised, first, logits_ptr, in_prompt_ptr, in_output_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply penalties to a piece of one row.

    penalties: int32 [3 + columns, num_penalised]: rows, indices in the tables, proposed tokens, and the bits of
    `PENALTIES`. first: id of the first column's token.
    """
    own = penalties_ptr + tl.program_id(0)
    row = tl.load(own).to(tl.int64)
    place = tl.load(own + num_penalised).to(tl.int64)
    repetition = tl.load(own + REPETITION * num_penalised).to(tl.float32, bitcast=True)
    frequency = tl.load(own + FREQUENCY * num_penalised).to(tl.float32, bitcast=True)
    presence = tl.load(own + PRESENCE * num_penalised).to(tl.float32, bitcast=True)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    at = logits_ptr + row * VOCAB + token
    value = tl.load(at, mask=mask, other=0.0)
    count = tl.load(in_output_ptr + place * VOCAB + token, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + place * VOCAB + token, mask=mask, other=0)
    proposed = tl.load(own + PROPOSED * num_penalised)
    while proposed >= 0:
        count += (first + token == proposed).to(tl.int32)
        own -= 1
        proposed = tl.load(own + PROPOSED * num_penalised)
    repeated = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where((in_prompt != 0) | (count > 0), repeated, value)
    value = value - frequency * count.to(tl.float32)
    value = value - presence * (count > 0).to(tl.float32)
    tl.store(at, value, mask=mask)


@triton.jit(do_not_specialize=["num_penalised", "first"])
def count_tokens(penalties_ptr, num_penalised, first, tokens_ptr, in_output_ptr, VOCAB: tl.constexpr):
    """Compute in_output[place, a row's token] += 1, unless a proposed token before it was not sampled, or it is in no
    column, as that of a failed row (-1)."""
    own = penalties_ptr + tl.program_id(0)
    row = tl.load(own)
    place = tl.load(own + num_penalised).to(tl.int64)
    column = tl.load(tokens_ptr + row) - first
    counts = (column >= 0) & (column < VOCAB)
    proposed = tl.load(own + PROPOSED * num_penalised)
    while proposed >= 0:
        own -= 1
        row -= 1
        counts = counts & (tl.load(tokens_ptr + row) == proposed)
        proposed = tl.load(own + PROPOSED * num_penalised)
    # Several rows of a request may have the same token.
    tl.atomic_add(in_output_ptr + place * VOCAB + column, 1, mask=counts, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def draw(
    settings_ptr,
    num_rows,
    logits_ptr,
    raw_ptr,
    listed_ptr,
    tokens_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT_BLOCK: tl.constexpr,
    UP_TO_CUT_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    IS_CHANGED: tl.constexpr,
):
    """Draw one row's token; -1 if the raw logits are not finite.

    settings: int32 [columns + 2, num_rows]: the bits of `DRAWS`, then the key's low and high half. listed: int32
    [num_rows, 2 * CAPACITY + LIST_PADDING], for `list_tokens`. IS_CHANGED: raw differs from logits.
    """
    row = tl.program_id(0).to(tl.int64)
    own = settings_ptr + row
    top_k = tl.load(own + TOP_K * num_rows)
    share = tl.load(own + TOP_P * num_rows)
    temperature = tl.load(own + TEMPERATURE * num_rows).to(tl.float32, bitcast=True)
    floor = tl.load(own + MIN_P * num_rows).to(tl.float32, bitcast=True)
    key_low = tl.load(own + KEY_LOW * num_rows).to(tl.uint32, bitcast=True)
    key_high = tl.load(own + KEY_HIGH * num_rows).to(tl.uint32, bitcast=True)
    logits_ptr += row * VOCAB
    raw_ptr += row * VOCAB
    listed_ptr += row * (2 * CAPACITY + LIST_PADDING)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    highest_raw = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
        raw = value
        if IS_CHANGED:
            raw = tl.load(raw_ptr + token, mask=token < VOCAB, other=float("-inf"))
            highest_raw = tl.where(raw > highest_raw, raw, highest_raw)
        broken = broken | ((raw != raw) | (raw == float("inf"))).to(tl.int32)
        best_token = tl.where(value > best, token, best_token)
        best = tl.where(value > best, value, best)
    maximum = tl.max(best, 0)
    winner = first(best, best_token, maximum, VOCAB)
    highest = tl.max(highest_raw, 0) if IS_CHANGED else maximum
    is_finite = (tl.max(broken, 0) == 0) & (highest > float("-inf"))

    if is_finite & (temperature > 0.0):
        cut = tl.full((), LAST_KEY, tl.int32)
        kept = tl.full((), VOCAB, tl.int64)
        dropped = tl.full((), 0, tl.int64)
        num_listed = tl.full((), -1, tl.int32)
        least = gumbel(key_low, key_high, winner)
        if (top_k < VOCAB) | (share < WHOLE_SHARE):
            pivots, counts, masses = first_pass(logits_ptr, maximum, temperature, floor, VOCAB, CUT_BLOCK)
            count, mass = tl.max(counts, 0), tl.max(masses, 0)
            target = share_of(mass, share)
            enough = (masses >= target) if top_k >= count else (counts >= top_k)
            cut = tl.min(tl.where(enough, pivots, cut), 0)
            num_left = tl.min(tl.where(enough, counts, count), 0)
            within = tl.min(tl.where(enough, masses, mass), 0)
            if num_left <= CAPACITY:
                num_listed = list_tokens(
                    logits_ptr, listed_ptr, maximum, temperature, floor, cut, least, key_low, key_high,
                    VOCAB, UP_TO_CUT_BLOCK, CAPACITY, BY_NOISE=False,
                )  # fmt: skip
            if top_k < count:
                cut, kept, dropped = find_cut(
                    logits_ptr, listed_ptr, num_listed, maximum, temperature, floor, cut, num_left.to(tl.int64),
                    top_k.to(tl.int64), VOCAB, CUT_BLOCK, CAPACITY, BY_MASS=False,
                )  # fmt: skip
            if share < WHOLE_SHARE:
                if top_k < count:
                    within = mass_up_to(
                        cut, logits_ptr, listed_ptr, num_listed, maximum, temperature, floor, VOCAB, CUT_BLOCK, CAPACITY
                    )
                    target = share_of(within - dropped * mass_of(0.0 - cut.to(tl.float32, bitcast=True)), share)
                cut, kept, dropped = find_cut(
                    logits_ptr, listed_ptr, num_listed, maximum, temperature, floor, cut, within, target,
                    VOCAB, CUT_BLOCK, CAPACITY, BY_MASS=True,
                )  # fmt: skip
        if (num_listed < 0) & (dropped == 0):
            num_listed = list_tokens(
                logits_ptr, listed_ptr, maximum, temperature, floor, cut, least, key_low, key_high,
                VOCAB, BLOCK, CAPACITY, BY_NOISE=True,
            )  # fmt: skip
        # Among tokens equal to the cut the first ones stay, but the list is unordered.
        if (num_listed > CAPACITY) | (dropped > 0):
            num_listed = tl.full((), -1, tl.int32)
        winner = noisiest(
            logits_ptr, listed_ptr, num_listed, maximum, temperature, floor, cut, kept, dropped, key_low, key_high,
            VOCAB, CUT_BLOCK, CAPACITY,
        )  # fmt: skip
    tl.store(tokens_ptr + row, tl.where(is_finite, winner, -1).to(tl.int64))


@triton.jit
def first_pass(logits_ptr, maximum, temperature, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return a few pivot keys, and the number and mass of candidates up to each.

    The pivots are the last key and, from one octave below it on, keys in steps of half an octave. Most cuts of a real
    vocabulary's rows are there.
    """
    steps = FIRST_PIVOTS - 1 - tl.arange(0, FIRST_PIVOTS)
    pivots = LAST_KEY - (tl.where(steps > 0, steps + 1, 0) << 22)
    counts = tl.zeros([FIRST_PIVOTS, BLOCK], tl.int32)
    masses = tl.zeros([FIRST_PIVOTS, BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, key = scaled(logits_ptr, token, maximum, temperature, VOCAB)
        is_within = (key[None, :] <= pivots[:, None]) & (x >= floor)[None, :]
        counts += is_within.to(tl.int32)
        masses += tl.where(is_within, mass_of(x)[None, :], 0)
    return pivots, tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def list_tokens(
    logits_ptr,
    listed_ptr,
    maximum,
    temperature,
    floor,
    cut,
    least,
    key_low,
    key_high,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BY_NOISE: tl.constexpr,
):
    """List the candidates up to the cut, unordered: their x, then their tokens, then their number.

    BY_NOISE: only those whose sum with their noise can reach `least`. Returns their number; candidates beyond CAPACITY
    are counted but not written.
    """
    counter = listed_ptr + 2 * CAPACITY
    tl.store(counter, 0)
    tl.debug_barrier()
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, key = scaled(logits_ptr, token, maximum, temperature, VOCAB)
        stays = (key <= cut) & (x >= floor)
        if BY_NOISE:
            stays = stays & (x + most_noise(key_low, key_high, token) >= least)
        place = tl.atomic_add(counter + tl.zeros([BLOCK], tl.int32), 1, mask=stays, sem="relaxed")
        fits = stays & (place < CAPACITY)
        tl.store(listed_ptr + place, x.to(tl.int32, bitcast=True), mask=fits)
        tl.store(listed_ptr + CAPACITY + place, token, mask=fits)
    # Other threads of the program read what these have written.
    tl.debug_barrier()
    return tl.atomic_add(counter, 0)


@triton.jit
def candidate(
    logits_ptr, listed_ptr, num_listed, at, maximum, temperature, VOCAB: tl.constexpr, CAPACITY: tl.constexpr
):
    """Return token, x and key at an index of the list, or of the row if there is no list (`num_listed` < 0)."""
    if num_listed >= 0:
        token = tl.load(listed_ptr + CAPACITY + at, mask=at < num_listed, other=0)
        bits = tl.load(listed_ptr + at, mask=at < num_listed, other=NEGATIVE_INFINITY)
        x = bits.to(tl.float32, bitcast=True)
    else:
        token = at
        x, _ = scaled(logits_ptr, at, maximum, temperature, VOCAB)
    return token, x, tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def noisiest(
    logits_ptr,
    listed_ptr,
    num_listed,
    maximum,
    temperature,
    floor,
    cut,
    kept,
    dropped,
    key_low,
    key_high,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Return the token with the highest x + noise up to the cut.

    If any are dropped, only the first `kept` at the cut count.
    """
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    num_ties = tl.full((), 0, tl.int64)
    for start in range(0, num_listed if num_listed >= 0 else VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token, x, key = candidate(logits_ptr, listed_ptr, num_listed, at, maximum, temperature, VOCAB, CAPACITY)
        stays = (key <= cut) & (x >= floor)
        if dropped > 0:
            tie = (stays & (key == cut)).to(tl.int32)
            stays = stays & ((tie == 0) | (num_ties + tl.cumsum(tie, 0) <= kept))
            num_ties += tl.sum(tie, 0)
        noisy = x + gumbel(key_low, key_high, token)
        better = stays & ((noisy > best) | ((noisy == best) & (token < best_token)))
        best_token = tl.where(better, token, best_token)
        best = tl.where(better, noisy, best)
    return first(best, best_token, tl.max(best, 0), VOCAB)


@triton.jit
def find_cut(
    logits_ptr,
    listed_ptr,
    num_listed,
    maximum,
    temperature,
    floor,
    last,
    within,
    target,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Return the lowest key at which the row's measure, summed from the best token on, reaches `target`.

    `within`: the measure of all keys up to `last`. Returns the cut, how many tokens at the cut stay, and how many are
    dropped. Each pass compares with PIVOTS keys at once: first one octave each, then equal steps.
    """
    j = tl.arange(0, PIVOTS)
    begin = tl.full((), 0, tl.int32)
    below = tl.full((), 0, tl.int64)
    # At least nearly twice the smallest measure means two tokens; less is one token, which needs no search.
    while (begin < last) & (within * 8 >= unit(last, BY_MASS) * 15):
        span = last - begin
        equal = tl.minimum(begin + (j + 1) * (span // PIVOTS + 1) - 1, last)
        pivots = tl.where(span > (PIVOTS << 23), last - ((PIVOTS - 1 - j) << 23), equal)
        sums = tl.zeros([PIVOTS, BLOCK], tl.int64)
        for start in range(0, num_listed if num_listed >= 0 else VOCAB, BLOCK):
            at = start + tl.arange(0, BLOCK)
            _, x, key = candidate(logits_ptr, listed_ptr, num_listed, at, maximum, temperature, VOCAB, CAPACITY)
            inside = (key >= begin) & (key <= last) & (x >= floor)
            amount = inside.to(tl.int64)
            if BY_MASS:
                amount = tl.where(inside, mass_of(x), 0)
            sums += tl.where(key[None, :] <= pivots[:, None], amount[None, :], 0)
        reached = below + tl.sum(sums, 1)
        enough = reached >= target
        end_measure = tl.min(tl.where(enough, reached, 0x7FFFFFFFFFFFFFFF), 0)
        last = tl.min(tl.where(enough, pivots, last), 0)
        begin = tl.max(tl.where(enough, begin, pivots + 1), 0)
        below = tl.max(tl.where(enough, below, reached), 0)
        within = end_measure - below
    size = unit(last, BY_MASS)
    kept = tl.full((), VOCAB, tl.int64)
    dropped = tl.full((), 0, tl.int64)
    if begin == last:
        kept = (target - below + size - 1) // size
        dropped = within // size - kept
    return last, kept, dropped


@triton.jit
def mass_up_to(
    cut,
    logits_ptr,
    listed_ptr,
    num_listed,
    maximum,
    temperature,
    floor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    masses = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_listed if num_listed >= 0 else VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, x, key = candidate(logits_ptr, listed_ptr, num_listed, at, maximum, temperature, VOCAB, CAPACITY)
        masses += tl.where((key <= cut) & (x >= floor), mass_of(x), 0)
    return tl.sum(masses, 0)


@triton.jit
def share_of(mass, share):
    """Return mass * share / 2^24 rounded down, at least 1, without exceeding 64 bits."""
    low = ((mass & (WHOLE_SHARE - 1)) * share) >> SHARE_BITS
    return tl.maximum((mass >> SHARE_BITS) * share + low, 1)


@triton.jit
def unit(key, BY_MASS: tl.constexpr):
    """Return the measure of one token with this key."""
    size = tl.full((), 1, tl.int64)
    if BY_MASS:
        size = mass_of(0.0 - key.to(tl.float32, bitcast=True))
    return size


@triton.jit
def scaled(logits_ptr, token, maximum, temperature, VOCAB: tl.constexpr):
    """Return (logit - maximum) / temperature, and its key."""
    value = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
    x = tl.div_rn(value - maximum, temperature)
    return x, tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def first(best, best_token, maximum, VOCAB: tl.constexpr):
    """Return the lowest token id among the lanes with the maximum."""
    return tl.min(tl.where(best == maximum, best_token, VOCAB - 1), 0)


@triton.jit
def random_bits(key_low, key_high, token):
    return mix32(mix32(token.to(tl.uint32) * 0x9E3779B1 + key_low) ^ key_high)


@triton.jit
def most_noise(key_low, key_high, token):
    """Return a bound of `gumbel` without logarithms: -log(-log(1 - u)) <= -log(u), whose exponent is that of the
    bits."""
    bits = random_bits(key_low, key_high, token).to(tl.float32)
    exponent = (bits.to(tl.int32, bitcast=True) >> 23) - 127
    return (32 - exponent).to(tl.float32) * LN2 + 0.01


@triton.jit
def gumbel(key_low, key_high, token):
    bits = random_bits(key_low, key_high, token)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * UNIT, ALMOST_ONE)
    w = 1.0 - u
    exponential = tl.div_rn((w - 1.0) + u, w) - natural_log(w)
    return 0.0 - natural_log(exponential)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def natural_log(y):
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    r = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    series = r * LOG_SERIES[7] + LOG_SERIES[6]
    for i in tl.static_range(6):
        series = series * r + LOG_SERIES[5 - i]
    return exponent.to(tl.float32) * LN2 + (r + (r * r) * series)


@triton.jit
def mass_of(x):
    power = tl.maximum(x, 0.0 - REACH) * LOG2E
    whole = tl.floor(power + 0.5)
    part = power - whole
    result = part * POWER_SERIES[5] + POWER_SERIES[4]
    for i in tl.static_range(4):
        result = result * part + POWER_SERIES[3 - i]
    result = result * ((whole.to(tl.int32) + MASS_BIAS) << 23).to(tl.float32, bitcast=True)
    return tl.where(x > 0.0 - REACH, result.to(tl.int64), 0)


@triton.jit(do_not_specialize=["width"])
def report(
    rows_ptr,
    num_top_ptr,
    logits_ptr,
    best_ptr,
    chosen_ptr,
    masses_ptr,
    above_ptr,
    values_ptr,
    ids_ptr,
    width,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute what one row's report needs of its logits: their mass, how many are above the chosen one, and the tokens
    that are likeliest. rows, num_top: int64 [reports].

    values: float32 [reports, width], of the top tokens; ids: int32.
    """
    i = tl.program_id(0)
    logits_ptr += tl.load(rows_ptr + i).to(tl.int64) * VOCAB
    num_top = tl.minimum(tl.load(num_top_ptr + i).to(tl.int32), width)
    maximum, chosen = tl.load(best_ptr + i), tl.load(chosen_ptr + i)
    masses = tl.zeros([BLOCK], tl.int64)
    above = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
        masses += mass_of(tl.minimum(value - maximum, 0.0))
        above += (value > chosen).to(tl.int64)
    tl.store(masses_ptr + i, tl.sum(masses, 0))
    tl.store(above_ptr + i, tl.sum(above, 0))
    # The next token is the best one behind the last, in the order of descending logits and ascending ids.
    last_value = tl.full((), float("inf"), tl.float32)
    last_token = tl.full((), -1, tl.int32)
    out = i.to(tl.int64) * width
    for n in range(num_top):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_token = tl.zeros([BLOCK], tl.int32)
        for start in range(0, VOCAB, BLOCK):
            token = start + tl.arange(0, BLOCK)
            value = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
            behind = (value < last_value) | ((value == last_value) & (token > last_token))
            better = behind & (value > best)
            best_token = tl.where(better, token, best_token)
            best = tl.where(better, value, best)
        last_value = tl.max(best, 0)
        last_token = first(best, best_token, last_value, VOCAB)
        tl.store(values_ptr + out + n, last_value)
        tl.store(ids_ptr + out + n, last_token)


@triton.jit(do_not_specialize=["num_reports"])
def log_of_masses(masses_ptr, num_reports, logs_ptr, BLOCK: tl.constexpr):
    """Compute the logarithms of masses, of which the best token's is 1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mass = tl.maximum(tl.load(masses_ptr + i, mask=i < num_reports, other=1), 1)
    tl.store(logs_ptr + i, natural_log(mass.to(tl.float32) * MASS_UNIT), mask=i < num_reports)

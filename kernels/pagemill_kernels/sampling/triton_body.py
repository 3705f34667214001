"""Sampling where the logits lie: changes, the draw with its filters in one program a row, log probabilities.

The arithmetic is that of `arithmetic`, `filters` and `randomness`, operation by operation; launchers forbid the
compiler to fuse products with sums, which would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.sampling import arithmetic

LN2: tl.constexpr = tl.constexpr(arithmetic.LN2)
LOG2E: tl.constexpr = tl.constexpr(arithmetic.LOG2E)
REACH: tl.constexpr = tl.constexpr(arithmetic.REACH)
LOG_SERIES: tl.constexpr = tl.constexpr(arithmetic.LOG_SERIES)
POWER_SERIES: tl.constexpr = tl.constexpr(arithmetic.POWER_SERIES)
SQRT_HALF_BITS: tl.constexpr = tl.constexpr(arithmetic.SQRT_HALF_BITS)
MASS_BIAS: tl.constexpr = tl.constexpr(127 + arithmetic.MASS_BITS)
SHARE_BITS: tl.constexpr = tl.constexpr(arithmetic.SHARE_BITS)
WHOLE_SHARE: tl.constexpr = tl.constexpr(1 << arithmetic.SHARE_BITS)
LAST_KEY: tl.constexpr = tl.constexpr(0x41CFFFFF)
"""Key of the least likely token that can be drawn, one below that of REACH. A key is the bits of -x as an integer: it
grows as tokens become less likely."""
PIVOTS: tl.constexpr = tl.constexpr(8)
"""Keys that one pass over a row compares with."""
UNIT: tl.constexpr = tl.constexpr(2.0**-32)
ALMOST_ONE: tl.constexpr = tl.constexpr(1 - 2.0**-24)
MOST_NOISE: tl.constexpr = tl.constexpr(16.75)
"""A little more than the noise where the uniform number is ALMOST_ONE, 16.64."""


@triton.jit(do_not_specialize=["num_edits"])
def edit(edits_ptr, num_edits, logits_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """logits[row, token] += bias. edits: int32 [3, num_edits], rows, tokens and the bits of biases."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_edits
    row = tl.load(edits_ptr + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(edits_ptr + num_edits + i, mask=mask, other=0)
    bias = tl.load(edits_ptr + 2 * num_edits + i, mask=mask, other=0).to(tl.float32, bitcast=True)
    at = logits_ptr + row * VOCAB + token
    tl.store(at, tl.load(at, mask=mask, other=0.0) + bias, mask=mask)


@triton.jit(do_not_specialize=["num_words"])
def forbid(rows_ptr, bits_ptr, num_words, logits_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of one row: -inf for every token without a bit. bits: int32 [masks, num_words]."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    words = bits_ptr + tl.program_id(0).to(tl.int64) * num_words
    word = tl.load(words + token // 32, mask=mask, other=-1)
    is_forbidden = (word >> (token % 32)) & 1 == 0
    tl.store(logits_ptr + row * VOCAB + token, float("-inf"), mask=mask & is_forbidden)


@triton.jit(do_not_specialize=["num_penalised"])
def penalise(
    penalties_ptr, num_penalised, logits_ptr, in_prompt_ptr, in_output_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of one row. penalties: int32 [5, num_penalised], rows, places in the tables, and the bits of repetition,
    frequency and presence."""
    own = penalties_ptr + tl.program_id(0)
    row = tl.load(own).to(tl.int64)
    place = tl.load(own + num_penalised).to(tl.int64)
    repetition = tl.load(own + 2 * num_penalised).to(tl.float32, bitcast=True)
    frequency = tl.load(own + 3 * num_penalised).to(tl.float32, bitcast=True)
    presence = tl.load(own + 4 * num_penalised).to(tl.float32, bitcast=True)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    at = logits_ptr + row * VOCAB + token
    value = tl.load(at, mask=mask, other=0.0)
    count = tl.load(in_output_ptr + place * VOCAB + token, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + place * VOCAB + token, mask=mask, other=0)
    repeated = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where((in_prompt != 0) | (count > 0), repeated, value)
    value = value - frequency * count.to(tl.float32)
    value = value - presence * (count > 0).to(tl.float32)
    tl.store(at, value, mask=mask)


@triton.jit(do_not_specialize=["num_penalised"])
def count_tokens(penalties_ptr, num_penalised, tokens_ptr, in_output_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """in_output[place, the row's token] += 1; a row that broke has no token."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_penalised
    row = tl.load(penalties_ptr + i, mask=mask, other=0)
    place = tl.load(penalties_ptr + num_penalised + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + row, mask=mask, other=-1)
    mask = mask & (token >= 0)
    at = in_output_ptr + place * VOCAB + token
    tl.store(at, tl.load(at, mask=mask, other=0) + 1, mask=mask)


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
    CAPACITY: tl.constexpr,
    IS_CHANGED: tl.constexpr,
):
    """One row's token, or -1 where the raw logits are broken.

    settings: int32 [6, num_rows], top_k, top_p in parts of 2^24, the bits of temperature and of min_p's logarithm, the
    key's low and high half. listed: float32 [num_rows, CAPACITY], for `find_cut`. IS_CHANGED: raw is not the same as
    logits.
    """
    row = tl.program_id(0).to(tl.int64)
    own = settings_ptr + row
    top_k = tl.load(own)
    share = tl.load(own + num_rows)
    temperature = tl.load(own + 2 * num_rows).to(tl.float32, bitcast=True)
    floor = tl.load(own + 3 * num_rows).to(tl.float32, bitcast=True)
    key_low = tl.load(own + 4 * num_rows).to(tl.uint32, bitcast=True)
    key_high = tl.load(own + 5 * num_rows).to(tl.uint32, bitcast=True)
    logits_ptr += row * VOCAB
    raw_ptr += row * VOCAB
    listed_ptr += row * CAPACITY

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
        if top_k < VOCAB:
            cut, kept, dropped = find_cut(
                logits_ptr, listed_ptr, maximum, temperature, floor, cut, dropped, top_k, VOCAB, CUT_BLOCK, CAPACITY,
                BY_MASS=False,
            )  # fmt: skip
        if share < WHOLE_SHARE:
            cut, kept, dropped = find_cut(
                logits_ptr, listed_ptr, maximum, temperature, floor, cut, dropped, share, VOCAB, CUT_BLOCK, CAPACITY,
                BY_MASS=True,
            )  # fmt: skip
        winner = noisiest(
            logits_ptr, maximum, winner, temperature, floor, cut, kept, dropped, key_low, key_high, VOCAB, BLOCK
        )
    tl.store(tokens_ptr + row, tl.where(is_finite, winner, -1).to(tl.int64))


@triton.jit
def noisiest(
    logits_ptr,
    maximum,
    likeliest,
    temperature,
    floor,
    cut,
    kept,
    dropped,
    key_low,
    key_high,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token with the highest x + noise up to the cut; of those at the cut the first `kept`, if any are dropped.

    `likeliest`: the first token with x = 0. Its sum is a bound that others must be able to reach.
    """
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    num_ties = tl.full((), 0, tl.int64)
    in_reach = gumbel(key_low, key_high, likeliest) - MOST_NOISE
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, key = scaled(logits_ptr, token, maximum, temperature, VOCAB)
        stays = (key <= cut) & (x >= floor)
        if dropped > 0:
            tie = (stays & (key == cut)).to(tl.int32)
            stays = stays & ((tie == 0) | (num_ties + tl.cumsum(tie, 0) <= kept))
            num_ties += tl.sum(tie, 0)
        stays = stays & (x >= in_reach)
        # Most pieces of a row have nothing to draw from.
        if tl.max(stays.to(tl.int32), 0) > 0:
            noisy = x + gumbel(key_low, key_high, token)
            better = stays & (noisy > best)
            best_token = tl.where(better, token, best_token)
            best = tl.where(better, noisy, best)
    return first(best, best_token, tl.max(best, 0), VOCAB)


@triton.jit
def find_cut(
    logits_ptr,
    listed_ptr,
    maximum,
    temperature,
    floor,
    last,
    dropped,
    amount,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """The lowest key at which the row's measure, counted from the best token on, reaches `amount`: a number of tokens,
    or a share of the mass up to `last` without the `dropped` tokens there.

    Returns the cut, how many tokens at the cut stay, and how many there are more. Each pass compares with PIVOTS keys
    at once: first one octave each, then equal steps. Once the tokens between the keys in question fit, passes read a
    list of them in place of the row.
    """
    j = tl.arange(0, PIVOTS)
    begin = tl.full((), 0, tl.int32)
    below = tl.full((), 0, tl.int64)
    within = tl.full((), 0, tl.int64)
    target = amount.to(tl.int64)
    num_listed = tl.full((), VOCAB, tl.int32)
    is_listed = tl.full((), 0, tl.int32)
    is_first = tl.full((), 1, tl.int32)
    # Nearly twice the least measure: two tokens are in there; what is less is one, and needs no closer look.
    while (is_first > 0) | ((begin < last) & (within * 8 >= unit(last, BY_MASS) * 15)):
        span = last - begin
        equal = tl.minimum(begin + (j + 1) * (span // PIVOTS + 1) - 1, last)
        octaves = last - ((PIVOTS - 1 - j) << 23)
        pivots = tl.where(span > (PIVOTS << 23), octaves, equal)
        sums = tl.zeros([PIVOTS, BLOCK], tl.int64)
        if is_listed > 0:
            for start in range(0, num_listed, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(listed_ptr + at, mask=at < num_listed, other=float("-inf"))
                key = tl.abs(x).to(tl.int32, bitcast=True)
                inside = (key >= begin) & (key <= last)
                sums += measured(x, key, inside, pivots, BY_MASS)
        else:
            num_inside = tl.full((), 0, tl.int32)
            for start in range(0, VOCAB, BLOCK):
                token = start + tl.arange(0, BLOCK)
                x, key = scaled(logits_ptr, token, maximum, temperature, VOCAB)
                inside = (key >= begin) & (key <= last) & (x >= floor)
                sums += measured(x, key, inside, pivots, BY_MASS)
                if num_inside <= CAPACITY:
                    place = num_inside + tl.cumsum(inside.to(tl.int32), 0) - 1
                    tl.store(listed_ptr + place, x, mask=inside & (place < CAPACITY))
                    num_inside += tl.sum(inside.to(tl.int32), 0)
            if num_inside <= CAPACITY:
                is_listed = tl.full((), 1, tl.int32)
                num_listed = num_inside
                # Other threads of the program read what these have written.
                tl.debug_barrier()
        reached = below + tl.sum(sums, 1)
        if is_first > 0:
            total = tl.max(reached, 0)
            if BY_MASS:
                left = total - dropped * mass_of(0.0 - last.to(tl.float32, bitcast=True))
                low = ((left & (WHOLE_SHARE - 1)) * target) >> SHARE_BITS
                target = tl.maximum((left >> SHARE_BITS) * target + low, 1)
            else:
                target = tl.minimum(target, total)
        is_first = tl.full((), 0, tl.int32)
        enough = reached >= target
        end_measure = tl.min(tl.where(enough, reached, 0x7FFFFFFFFFFFFFFF), 0)
        last = tl.min(tl.where(enough, pivots, last), 0)
        begin = tl.max(tl.where(enough, begin, pivots + 1), 0)
        below = tl.max(tl.where(enough, below, reached), 0)
        within = end_measure - below
    size = unit(last, BY_MASS)
    kept = tl.full((), VOCAB, tl.int64)
    more = tl.full((), 0, tl.int64)
    if begin == last:
        kept = (target - below + size - 1) // size
        more = within // size - kept
    # A later list of this program must not overwrite what is still read of this one.
    tl.debug_barrier()
    return last, kept, more


@triton.jit
def measured(x, key, inside, pivots, BY_MASS: tl.constexpr):
    """[PIVOTS, BLOCK]: the measure of each token inside, for every pivot that is not before it."""
    amount = inside.to(tl.int64)
    if BY_MASS:
        amount = tl.where(inside, mass_of(x), 0)
    return tl.where(key[None, :] <= pivots[:, None], amount[None, :], 0)


@triton.jit
def unit(key, BY_MASS: tl.constexpr):
    """The measure of one token with this key."""
    size = tl.full((), 1, tl.int64)
    if BY_MASS:
        size = mass_of(0.0 - key.to(tl.float32, bitcast=True))
    return size


@triton.jit
def scaled(logits_ptr, token, maximum, temperature, VOCAB: tl.constexpr):
    """(logit - maximum) / temperature, and its key."""
    value = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
    x = tl.div_rn(value - maximum, temperature)
    return x, tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def first(best, best_token, maximum, VOCAB: tl.constexpr):
    """The lowest token id among the lanes that hold the maximum."""
    return tl.min(tl.where(best == maximum, best_token, VOCAB - 1), 0)


@triton.jit
def gumbel(key_low, key_high, token):
    bits = mix32(mix32(token.to(tl.uint32) * 0x9E3779B1 + key_low) ^ key_high)
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


@triton.jit(do_not_specialize=["num_reports", "width"])
def report(
    reports_ptr,
    num_reports,
    raw_ptr,
    tokens_ptr,
    values_ptr,
    ids_ptr,
    width,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's log probabilities. reports: int32 [2, num_reports], rows and numbers of top tokens.

    values: float32 [num_reports, width], the chosen token's, then the top tokens'; ids: int32, its rank, then theirs.
    """
    i = tl.program_id(0)
    row = tl.load(reports_ptr + i).to(tl.int64)
    num_top = tl.load(reports_ptr + num_reports + i)
    chosen = tl.maximum(tl.load(tokens_ptr + row), 0)
    raw_ptr += row * VOCAB
    chosen_value = tl.load(raw_ptr + chosen)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(raw_ptr + token, mask=token < VOCAB, other=float("-inf"))
        highest = tl.maximum(highest, value)
    maximum = tl.max(highest, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    more_likely = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(raw_ptr + token, mask=token < VOCAB, other=float("-inf"))
        sums += tl.exp(value - maximum)
        more_likely += (value > chosen_value).to(tl.int32)
    total = tl.log(tl.sum(sums, 0))
    out = i.to(tl.int64) * width
    tl.store(values_ptr + out, chosen_value - maximum - total)
    tl.store(ids_ptr + out, tl.sum(more_likely, 0) + 1)
    # The next token is the best of those behind the last one, in the order of falling logits and rising ids.
    last_value = tl.full((), float("inf"), tl.float32)
    last_token = tl.full((), -1, tl.int32)
    for n in range(num_top):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_token = tl.zeros([BLOCK], tl.int32)
        for start in range(0, VOCAB, BLOCK):
            token = start + tl.arange(0, BLOCK)
            value = tl.load(raw_ptr + token, mask=token < VOCAB, other=float("-inf"))
            behind = (value < last_value) | ((value == last_value) & (token > last_token))
            better = behind & (value > best)
            best_token = tl.where(better, token, best_token)
            best = tl.where(better, value, best)
        last_value = tl.max(best, 0)
        last_token = first(best, best_token, last_value, VOCAB)
        tl.store(values_ptr + out + 1 + n, last_value - maximum - total)
        tl.store(ids_ptr + out + 1 + n, last_token)

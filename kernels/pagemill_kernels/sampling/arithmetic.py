"""Logarithm and probability mass as exact sequences of float32 operations, so that every device has the same bits.

Libraries round logarithms and exponentials differently. Here each product and each sum is rounded once, in the order
written (no fused multiply-add), and masses are integers, whose sum has no order. All constants are float32.

    log(y), y > 0 and normal: y = 2^e * m with m in [sqrt(1/2), sqrt(2)), r = m - 1,
        log(y) = e * LN2 + (r + (r * r) * q(r)), q by Horner's rule over LOG_SERIES
    mass(x), x <= 0: 0 where x <= -REACH, else the integer part of 2^40 * 2^t with t = x * LOG2E:
        n = floor(t + 0.5), p(t - n) by Horner's rule over POWER_SERIES, p * 2^(n + 40)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

REACH = 26.0
"""A token this much less likely than the best one, as a difference of logarithms, is never drawn (`randomness`)."""
LN2, LOG2E = 0.6931471805599453, 1.4426950408889634
SQRT_HALF_BITS = 0x3F3504F3
LOG_SERIES = (
    -0.4999999403953552,
    0.33333641290664673,
    -0.2500205934047699,
    0.1997445821762085,
    -0.165620356798172,
    0.14775051176548004,
    -0.14352191984653473,
    0.09226369857788086,
)
"""(log(1 + r) - r) / r^2 over the range of r, by powers of r; the error is at most 2e-7."""
POWER_SERIES = (
    1.0000001192092896,
    0.6931472420692444,
    0.2402210682630539,
    0.05550297349691391,
    0.009676036424934864,
    0.0013409993844106793,
)
"""2^f for f in [-1/2, 1/2], by powers of f; the error is at most 8e-8."""
MASS_BITS = 40
"""The best token's mass is 2^40: a whole vocabulary's sum stays far below 2^63."""
SHARE_BITS = 24
WHOLE_SHARE = 1 << SHARE_BITS
PIECE = 8192
"""Elements of a long row that are computed at a time, so that intermediate values stay in the cache."""

Floats = NDArray[np.float32]


def log(y: Floats) -> Floats:
    bits = y.view(np.int32)
    exponent = (bits - np.int32(SQRT_HALF_BITS)) >> np.int32(23)
    r = (bits - (exponent << np.int32(23))).view(np.float32)
    r -= np.float32(1.0)
    series = _horner(LOG_SERIES, r)
    series *= r * r
    series += r
    series += exponent.astype(np.float32) * np.float32(LN2)
    return series


def mass(x: Floats) -> NDArray[np.int64]:
    power = np.maximum(x, np.float32(-REACH))
    power *= np.float32(LOG2E)
    whole = np.floor(power + np.float32(0.5))
    power -= whole
    result = _horner(POWER_SERIES, power)
    result *= ((whole.astype(np.int32) + np.int32(127 + MASS_BITS)) << np.int32(23)).view(np.float32)
    result *= x > np.float32(-REACH)
    return result.astype(np.int64)


def total_mass(x: Floats) -> np.int64:
    """Return the mass of a whole row, x: [vocab]."""
    return np.int64(sum(mass(x[at : at + PIECE]).sum() for at in range(0, len(x), PIECE)))


def share(part: float) -> int:
    """Return a part, a float32 from 0 to 1, in parts of 2^24, rounded down."""
    return int(np.float32(part) * np.float32(WHOLE_SHARE))


def share_of(masses: np.int64, share: int) -> int:
    """Return masses * share / 2^24 rounded down, at least 1, without exceeding 64 bits."""
    low = (masses & (WHOLE_SHARE - 1)) * share >> SHARE_BITS
    return max(int((masses >> SHARE_BITS) * share + low), 1)


def _horner(series: tuple[float, ...], x: Floats) -> Floats:
    result = np.full_like(x, series[-1])
    for factor in series[-2::-1]:
        result *= x
        result += np.float32(factor)
    return result

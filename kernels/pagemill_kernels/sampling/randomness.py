"""The randomness of sampling, as a specification that any device can follow bit for bit.

A token is drawn by Gumbel-max: argmax over tokens v of logit[v] / temperature + gumbel(key, v), which is a draw from
the softmax; of equal sums the lower token id wins. The noise is a pure function of (seed, choice, position, token id):
it depends neither on the batch nor on what was drawn before, so a resumed, preempted or re-batched request continues as
if nothing had happened. All integer arithmetic is unsigned.

    key: 64 bits, from seed (taken mod 2^64), choice and position (tokens generated so far), with
        mix64(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
        (SplitMix64) key = mix64(mix64(mix64(seed + G) + choice + G) + position + G),  G = 0x9E3779B97F4A7C15
    bits: 32 bits, from key and token id, with
        mix32(x): x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^= x >> 16     (MurmurHash3's
        finalizer) bits = mix32(mix32(token_id * 0x9E3779B1 + low32(key)) ^ high32(key))
    noise: in float32, each operation rounded once, with `arithmetic.log`:
        u = min((bits + 0.5) * 2^-32, 1 - 2^-24);  w = 1 - u;  e = ((w - 1) + u) / w - log(w)
        gumbel = -log(e)

e is -log(1 - u) with all of its bits where u is small: there a token wins, so the winning end has the full resolution
of 2^-32. Values lie in [-2.82, 22.88], hence a token more than `REACH` below the best one cannot win and needs no
noise. The statistical test (tests/engine/test_sampler_random.py) checks uniformity, independence between positions,
seeds, choices and neighbouring tokens, and drawn frequencies against the softmax by chi-square.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.sampling import arithmetic
from pagemill_kernels.sampling.arithmetic import PIECE

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one 64-bit key per row."""
    with np.errstate(over="ignore"):
        key = _mix64(seeds + _GOLDEN)
        key = _mix64(key + choices.astype(np.uint64) + _GOLDEN)
        return _mix64(key + positions.astype(np.uint64) + _GOLDEN)


def halves(row_keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the low and the high 32 bits."""
    return (row_keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), (row_keys >> np.uint64(32)).astype(np.uint32)


def gumbel(row_keys: NDArray[np.uint64], token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the noise of pairs (key, token id); the arrays broadcast."""
    low, high = halves(row_keys)
    low, high, tokens = np.broadcast_arrays(low, high, token_ids.astype(np.uint32))
    noise = np.empty(tokens.shape, dtype=np.float32)
    for at in range(0, len(tokens), PIECE):
        piece = slice(at, at + PIECE)
        bits = _mix32(_mix32(tokens[piece] * np.uint32(0x9E3779B1) + low[piece]) ^ high[piece])
        noise[piece] = _gumbel(bits)
    return noise


def _gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    u = bits.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.minimum(u, np.float32(1 - 2.0**-24), out=u)
    one = np.float32(1.0)
    w = one - u
    exponential = ((w - one) + u) / w
    exponential -= arithmetic.log(w)
    return -arithmetic.log(exponential)


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))

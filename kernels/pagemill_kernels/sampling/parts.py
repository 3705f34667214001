"""Sampling from a vocabulary that several ranks divide, without the logits of all: the same tokens as `reference`.

Each rank finds the best token of its part. Of rows that draw, it then finds either the winner (noise is a function of
key and token), or, where top_k or top_p filter, the likeliest candidates and the mass of its part: masses are integers,
whose sum has no order. `decide` joins these; a row that they do not decide needs all of its logits. Who sends what to
whom is the engine's part (`executing.ranks.divided_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.sampling import arithmetic
from pagemill_kernels.sampling.arithmetic import WHOLE_SHARE, Floats
from pagemill_kernels.sampling.batch import Draws
from pagemill_kernels.sampling.filters import SHORTLIST
from pagemill_kernels.sampling.randomness import gumbel

_TOKEN = np.uint64(0xFFFFFFFF)


class BestTokens(NamedTuple):
    values: Floats
    """[rows]: the largest logit, NaN if there is one."""
    token_ids: NDArray[np.int64]


class PartOfRows(NamedTuple):
    """What a rank finds in its part of the vocabulary, by row."""

    sums: Floats
    """Of rows without filters: the winner's x + noise; -inf: no token can be drawn."""
    token_ids: NDArray[np.int64]
    """The winner."""
    masses: NDArray[np.int64]
    """Of rows with filters: the mass of all tokens, where top_k does not decide."""
    counts: NDArray[np.int64]
    """Of rows with filters: the number of candidates."""
    candidates: NDArray[np.uint64]
    """These, row by row, the likeliest first: the bits of -x above the token's id."""


def best_tokens(own: Floats, first: int) -> BestTokens:
    """Return the best tokens of a part. own: [rows, tokens]; first: id of the first token."""
    found = own.argmax(-1)
    return BestTokens(own[np.arange(len(own)), found], found + first)


def best_of_all(parts: Sequence[BestTokens]) -> BestTokens:
    """Return the best tokens of the vocabulary. `parts`: in the order of tokens."""
    values = np.stack([each.values for each in parts])
    found, rows = values.argmax(0), np.arange(values.shape[1])
    return BestTokens(values[found, rows], np.stack([each.token_ids for each in parts])[found, rows])


def part_of_rows(own: Floats, first: int, vocab_size: int, draws: Draws, best: Floats) -> PartOfRows:
    """Search a part of rows that draw. `own`, `first`: as for `best_tokens`; `best`: [rows], of the vocabulary."""
    rows, tokens = own.shape
    width = min(SHORTLIST, tokens)
    sums, candidates = np.empty(rows, dtype=np.float32), np.empty((rows, width), dtype=np.uint64)
    token_ids, masses, counts = (np.empty(rows, dtype=np.int64) for _ in range(3))
    held = [np.ascontiguousarray(each) for each in (own, draws.settings, draws.keys, best)]
    logits, settings, keys, largest = map(address, held)
    launch.native().pagemill_sample_part(
        library.PartArgs(
            logits=logits, num_rows=rows, num_tokens=tokens, first=first, vocab_size=vocab_size, draws=settings,
            keys=keys, best=largest, sums=address(sums), token_ids=address(token_ids), masses=address(masses),
            counts=address(counts), width=width, candidates=address(candidates), num_threads=launch.num_threads(),
        )
    )  # fmt: skip
    chosen = candidates[np.arange(width) < counts[:, None]]
    return PartOfRows(sums, token_ids, masses, counts, chosen)


def decide(parts: Sequence[PartOfRows], num_tokens: Sequence[int], draws: Draws) -> NDArray[np.int64]:
    """Return the token that each row draws, -1 where the candidates do not decide. `parts`: in the order of tokens;
    `num_tokens`: of each part."""
    vocab_size = sum(num_tokens)
    sums = np.stack([each.sums for each in parts])
    found, rows = sums.argmax(0), np.arange(sums.shape[1])
    token_ids: NDArray[np.int64] = np.stack([each.token_ids for each in parts])[found, rows]
    settings = draws.settings
    starts = [np.concatenate(([0], each.counts.cumsum())) for each in parts]
    for row in np.flatnonzero((settings["top_k"] < vocab_size) | (settings["top_p"] < WHOLE_SHARE)).tolist():
        of_parts = [each.candidates[start[row] : start[row + 1]] for each, start in zip(parts, starts, strict=True)]
        lasts = [own[-1] for own, size in zip(of_parts, num_tokens, strict=True) if len(own) == SHORTLIST < size]
        keys = np.sort(np.concatenate(of_parts))
        if lasts:  # behind the first of the last candidates of parts with more, those that are missing may come
            keys = keys[keys <= min(lasts)]
        kept = _num_kept(keys, not lasts, vocab_size, settings[row], sum(int(each.masses[row]) for each in parts))
        token_ids[row] = -1 if kept is None else _winner(keys[:kept], draws.keys[row])
    return token_ids


def _num_kept(
    keys: NDArray[np.uint64], is_complete: bool, vocab_size: int, settings: np.void, total: int
) -> int | None:
    """Return how many of the likeliest tokens pass the filters; None if these do not say it. `total`: the mass of all
    tokens."""
    top_k, share = int(settings["top_k"]), int(settings["top_p"])
    by_count = top_k < vocab_size
    if by_count and len(keys) < top_k and not is_complete:
        return None
    kept = min(top_k, len(keys)) if by_count else len(keys)
    if share == WHOLE_SHARE:
        return kept
    running = arithmetic.mass(_values(keys[:kept])).cumsum()
    limit = arithmetic.share_of(running[-1] if by_count else np.int64(total), share)
    reached = np.flatnonzero(running >= limit)
    if len(reached):
        return int(reached[0]) + 1
    return kept if is_complete else None


def _winner(keys: NDArray[np.uint64], key: np.uint64) -> int:
    token_ids = (keys & _TOKEN).astype(np.int64)
    noisy = _values(keys) + gumbel(np.full(len(keys), key), token_ids)
    return int(token_ids[noisy == noisy.max()].min())


def _values(keys: NDArray[np.uint64]) -> Floats:
    return -((keys >> np.uint64(32)).astype(np.uint32).view(np.float32))

"""Sampling from a vocabulary that several ranks divide, without the logits of all: the same tokens as `reference`.

Each rank finds the best token of its part. Of rows that draw, it then finds either the winner (noise is a function of
key and token), or, where top_k or top_p filter, the likeliest candidates and the mass of its part: masses are integers,
whose sum has no order. `decide` joins these; a row that they do not decide needs all of its logits. Who sends what to
whom is the part of `pagemill_execution.runners.ranks.divided_logits`.

Masks, biases and penalties change single tokens, so each rank changes its part before it searches. Of a row's log
probabilities it finds its likeliest tokens, the values of tokens that are asked for, and its mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import Array, address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.sampling import arithmetic
from pagemill_kernels.sampling.arithmetic import MASS_BITS, WHOLE_SHARE, Floats
from pagemill_kernels.sampling.batch import Draws, Edits, Logprobs, Penalties, Reports, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.filters import ALL_TOKENS, DRAWS, SHORTLIST
from pagemill_kernels.sampling.penalties import PENALTIES, apply_penalties
from pagemill_kernels.sampling.randomness import gumbel
from pagemill_kernels.sampling.reference import add_edits, apply_masks, likeliest

Rows = NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int64)
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


class Changes(NamedTuple):
    """What changes the logits of some rows in a part of the vocabulary, as arrays. Tokens count from the part's first
    one; places are those among `rows`."""

    rows: Rows
    """Of the batch, ascending."""
    masked: Rows
    """The places with masks."""
    bits: NDArray[np.uint8]
    """Their masks one behind the other, in whole words of 32 bits."""
    edited: Rows
    """A place for each edit."""
    edited_ids: Rows
    biases: Floats
    penalised: Rows
    """The places with penalties."""
    settings: Array
    """Records of `PENALTIES`."""
    seen: Rows
    """For each token that occurs in the prompt or output of one of these: its index in `penalised`."""
    seen_ids: Rows
    counts: NDArray[np.int32]
    """In the output."""
    in_prompt: NDArray[np.uint8]


CHANGES = tuple(
    np.dtype(each)
    for each in (
        np.int64, np.int64, np.uint8, np.int64, np.int64, np.float32, np.int64, PENALTIES.dtype, np.int64, np.int64,
        np.int32, np.uint8,
    )
)  # fmt: skip
"""The types of the arrays."""


def changed_rows(batch: SamplingBatch) -> Rows:
    """Return the rows whose logits are changed before tokens are chosen."""
    parts = (batch.masks, batch.edits, batch.penalties)
    return np.unique(np.concatenate([_NONE, *(each.rows for each in parts if each is not None)]))


def changes_of(batch: SamplingBatch, rows: Rows, first: int, end: int) -> Changes:
    """Return what changes a batch's `changed_rows` in the tokens from `first` to before `end`."""
    found = Changes(
        rows, _NONE, np.zeros(0, np.uint8), _NONE, _NONE, np.zeros(0, np.float32), _NONE, PENALTIES.empty(0), _NONE,
        _NONE, np.zeros(0, np.int32), np.zeros(0, np.uint8),
    )  # fmt: skip
    if batch.masks is not None:
        masks = batch.masks
        own = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, first:end]
        words = np.pad(own, ((0, 0), (0, -own.shape[1] % 32)))
        bits = np.packbits(words, axis=1, bitorder="little").reshape(-1)
        found = found._replace(masked=np.searchsorted(rows, masks.rows), bits=bits)
    if batch.edits is not None:
        edits = batch.edits
        at = np.flatnonzero((edits.token_ids >= first) & (edits.token_ids < end))
        places, token_ids = np.searchsorted(rows, edits.rows[at]), edits.token_ids[at] - first
        found = found._replace(edited=places, edited_ids=token_ids, biases=edits.biases[at])
    if batch.penalties is not None:
        given = batch.penalties
        counts, in_prompt = (each[given.count_rows, first:end] for each in (given.in_output, given.in_prompt))
        seen, token_ids = np.nonzero((counts > 0) | in_prompt)
        found = found._replace(
            penalised=np.searchsorted(rows, given.rows), settings=given.settings, seen=seen, seen_ids=token_ids,
            counts=counts[seen, token_ids], in_prompt=in_prompt[seen, token_ids].astype(np.uint8),
        )  # fmt: skip
    return found


def changed(own: Floats, changes: Changes) -> Floats:
    """Return the changed logits of the changed rows. own: of all rows, in this part."""
    found, num_tokens = own[changes.rows], own.shape[1]
    if len(changes.masked):
        apply_masks(found, TokenMasks(changes.masked, changes.bits.view(np.int32).reshape(len(changes.masked), -1)))
    add_edits(found, Edits(changes.edited, changes.edited_ids, changes.biases))
    if len(changes.penalised):
        shape, at = (len(changes.penalised), num_tokens), (changes.seen, changes.seen_ids)
        in_prompt, in_output = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.int32)
        in_prompt[at], in_output[at] = changes.in_prompt > 0, changes.counts
        places = np.arange(len(changes.penalised))
        apply_penalties(found, Penalties(changes.penalised, changes.settings, places, in_prompt, in_output))
    return found


class PartOfReports(NamedTuple):
    """What a rank finds of log probabilities in its part of the vocabulary, by report."""

    masses: NDArray[np.int64]
    top: Floats
    """[reports, most that are asked for or that the part has], descending."""
    top_ids: Rows
    values: Floats
    """[tokens that are asked for]: the logits of those that are in the part."""


def part_of_reports(own: Floats, first: int, best: Floats, width: int, asked: tuple[Rows, Rows]) -> PartOfReports:
    """Search a part of rows that report. own: [reports, tokens]; first: id of the first token; best: [reports], of
    the vocabulary; width: of the likeliest tokens; asked: reports and tokens whose logits are asked for."""
    with np.errstate(invalid="ignore"):  # rows that are not finite are never read
        settings = DRAWS.empty(len(own))
        settings["temperature"], settings["min_p"] = 1.0, -np.inf
        settings["top_k"], settings["top_p"] = ALL_TOKENS, 0
        draws = Draws(settings, np.zeros(len(own), dtype=np.uint64))
        masses = part_of_rows(own, first, own.shape[1], draws, best).masses
        top, top_ids = likeliest(own, min(width, own.shape[1]))
    places, token_ids = asked[0], asked[1] - first
    is_own = (token_ids >= 0) & (token_ids < own.shape[1])
    return PartOfReports(masses, top, top_ids + first, own[places[is_own], token_ids[is_own]])


def num_above(own: Floats, values: Floats) -> NDArray[np.int64]:
    """Return how many logits of each row of a part are above a value."""
    counts: NDArray[np.int64] = (own > values[:, None]).sum(axis=1, dtype=np.int64)
    return counts


def logprobs_of(
    parts: Sequence[PartOfReports], reports: Reports, best: Floats, values: Floats, ranks: NDArray[np.int64]
) -> Logprobs:
    """Return the log probabilities of all parts, in the order of tokens. `values`: the logits of the chosen tokens,
    and behind them of the named ones. `ranks`: of the chosen ones."""
    num_reports, width = len(reports.rows), int(reports.num_top.max())
    top, top_ids = (np.concatenate([each[place] for each in parts], axis=1) for place in (1, 2))
    order = np.argsort(-top, axis=1, kind="stable")[:, :width]
    extra = ((0, 0), (0, int(reports.widths.max()) - order.shape[1]))
    top, top_ids = (np.pad(np.take_along_axis(each, order, axis=1), extra) for each in (top, top_ids))
    if reports.named is not None:
        places, columns, token_ids = reports.named
        top[places, columns], top_ids[places, columns] = values[num_reports:], token_ids
    masses = sum((each.masses for each in parts), np.zeros(num_reports, dtype=np.int64))
    totals = np.array([math.log(max(1, int(mass)) * 2.0**-MASS_BITS) for mass in masses], dtype=np.float32)
    with np.errstate(invalid="ignore"):
        return Logprobs(values[:num_reports] - best - totals, ranks, top - best[:, None] - totals[:, None], top_ids)


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

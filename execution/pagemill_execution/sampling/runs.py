"""Samples requests with proposed tokens: as many tokens as agree with the proposal, and one more.

Each token is drawn with the key of its own position, so an answer is that of decoding without proposals, at any
temperature. A proposed token is kept exactly if it is the one that is drawn. `sampler` samples single tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.sampler import Mask, Sampled, mask_of, mask_rows, sample
from pagemill_execution.step import StepPlan


def masks_of(plan: StepPlan, request_ids: Iterable[str]) -> list[Mask | None]:
    """Return the mask of each token that the requests may sample, waiting for those that are being computed."""
    masks: list[Mask | None] = []
    for name in request_ids:
        given = plan.token_masks.get(name)
        masks += given if isinstance(given, list) else [mask_of(given)] + [None] * len(plan.proposals.get(name, ()))
    return masks


def sample_runs(
    logits: NDArray[np.float32],
    sampling: SamplingRows,
    rows: NDArray[np.int64],
    num_generated: NDArray[np.int64],
    proposed: Sequence[Sequence[int]],
    masks: list[Mask | None],
) -> Sampled:
    """Sample each request's next token, and the one behind each proposed token; `runs_of` says which ones count.

    logits: contiguous [tokens that may be sampled, vocab], request by request; may be overwritten. rows, num_generated:
    [requests], as for `sampler.sample`. masks: of the tokens that may be sampled.

    The tokens of a request with penalties depend on each other: then all requests are sampled in as many rounds.
    """
    counts = np.array([1 + len(tokens) for tokens in proposed], dtype=np.int64)
    if not sampling.penalised[rows[counts > 1]].any():
        return sample(logits, sampling, np.repeat(rows, counts), ranges(num_generated, counts), mask_rows(masks))
    starts = np.cumsum(counts) - counts
    found = Sampled(np.zeros(len(logits), dtype=np.int64), np.ones(len(logits), dtype=np.bool_), {})
    active, offset = np.arange(len(rows)), 0
    while len(active):
        places = starts[active] + offset
        given = mask_rows([masks[place] for place in places.tolist()])
        part = sample(logits[places], sampling, rows[active], num_generated[active] + offset, given)
        found.token_ids[places], found.finite[places] = part.token_ids, part.finite
        found.logprobs.update({int(places[index]): entry for index, entry in part.logprobs.items()})
        goes_on = [
            finite and offset < len(proposed[owner]) and token_id == proposed[owner][offset]
            for owner, token_id, finite in zip(active.tolist(), part.token_ids.tolist(), part.finite, strict=True)
        ]
        active, offset = active[goes_on], offset + 1
    return found


def runs_of(sampled: Sampled, proposed: Sequence[Sequence[int]]) -> list[range]:
    """Return the places of the tokens of each request that count: those that were proposed, and the one behind them."""
    runs, first, token_ids = [], 0, sampled.token_ids.tolist()
    for tokens in proposed:
        num_accepted = 0
        while num_accepted < len(tokens) and token_ids[first + num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        runs.append(range(first, first + num_accepted + 1))
        first += 1 + len(tokens)
    return runs


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `counts[i]` numbers from `starts[i]` on, one range behind the other."""
    ends = np.cumsum(counts)
    positions: NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return positions

"""Samples requests with proposed tokens: as many tokens as agree with the proposal, and one more.

Each token is drawn with the key of its own position, so an answer is that of decoding without proposals, at any
temperature. A proposed token is kept exactly if it is the one that is drawn. `sampler` samples single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.sampling.rows import SamplingRows
from pagemill_engine.sampling.sampler import Mask, mask_of, mask_rows, sample
from pagemill_engine.scheduler.step import StepPlan, TokenLogprobs


class SampledRuns(NamedTuple):
    token_ids: list[list[int]]
    """By request; the last ones are meaningless where `finite` is false."""
    finite: list[bool]
    logprobs: dict[int, list[TokenLogprobs]]
    """By index of the request, for those that asked for them; one for each token."""


def run_length(sampled: Sequence[int], proposed: Sequence[int]) -> int:
    """Return how many of the sampled tokens count: those that were proposed, and the one behind them.

    sampled: one more than were proposed.
    """
    num_accepted = 0
    while num_accepted < len(proposed) and sampled[num_accepted] == proposed[num_accepted]:
        num_accepted += 1
    return num_accepted + 1


def masks_of(plan: StepPlan, request_id: str) -> list[Mask | None]:
    """Return the mask of each token that a request may sample, waiting for one that is being computed."""
    given = plan.token_masks.get(request_id)
    if isinstance(given, list):
        return given
    return [mask_of(given)] + [None] * len(plan.proposals.get(request_id, ()))


def sample_runs(
    logits: NDArray[np.float32],
    sampling: SamplingRows,
    rows: NDArray[np.int64],
    num_generated: NDArray[np.int64],
    proposed: list[list[int]],
    masks: list[list[Mask | None]],
) -> SampledRuns:
    """Sample each request's next token, and one more behind each proposed token that was sampled.

    logits: contiguous [tokens that may be sampled, vocab], request by request; may be overwritten. rows, num_generated:
    [requests], as for `sampler.sample`. masks: by request, one for each token that may be sampled.

    The tokens of a request with penalties depend on each other: then its tokens are sampled in as many rounds.
    """
    counts = np.array([1 + len(tokens) for tokens in proposed], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    runs = SampledRuns([[] for _ in proposed], [True] * len(proposed), {})
    active = np.arange(len(proposed))
    in_rounds = bool(sampling.penalised[rows[counts > 1]].any())
    first = 0
    while len(active):
        widths = np.ones(len(active), dtype=np.int64) if in_rounds else counts[active]
        owners = np.repeat(active, widths)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(widths) - widths, widths) + first
        places = starts[owners] + offsets
        given = [masks[owner][offset] for owner, offset in zip(owners.tolist(), offsets.tolist(), strict=True)]
        part = logits if len(places) == len(logits) else logits[places]
        found = sample(part, sampling, rows[owners], num_generated[owners] + offsets, mask_rows(given))
        going = set(active.tolist())
        samples = zip(owners.tolist(), offsets.tolist(), found.token_ids.tolist(), found.finite.tolist(), strict=True)
        for place, (owner, offset, token_id, finite) in enumerate(samples):
            if owner not in going:
                continue
            runs.token_ids[owner].append(token_id)
            runs.finite[owner] = finite
            if place in found.logprobs:
                runs.logprobs.setdefault(owner, []).append(found.logprobs[place])
            tokens = proposed[owner]
            if not finite or offset == len(tokens) or token_id != tokens[offset]:
                going.discard(owner)
        if not in_rounds:
            return runs
        active = np.array(sorted(going), dtype=np.int64)
        first += 1
    return runs

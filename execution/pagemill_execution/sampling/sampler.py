"""Samples one token for each row of a batch, and returns the results by row.

A batch of plain greedy rows asks only for the best tokens. `pagemill_kernels.sampling` specifies and implements how
tokens are chosen.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.step import TokenLogprobs
from pagemill_kernels.sampling.batch import Logprobs, Reports, SampledTokens, TokenMasks
from pagemill_kernels.sampling.host import host_sampler

Mask = NDArray[np.int32]
"""A token mask: one bit per token, 32 per word."""


class Masked(Protocol):
    """What has a mask when it is read, such as `pagemill_engine.grammar.token_state.TokenState`."""

    @property
    def mask(self) -> Mask | None: ...


class Sampled(NamedTuple):
    token_ids: NDArray[np.int64]
    """[rows]; meaningless where `finite` is false."""
    finite: NDArray[np.bool_]
    """[rows]; False if the model's logits contain NaN or infinity."""
    logprobs: dict[int, TokenLogprobs]
    """Log probabilities by index into the batch, for rows that asked for them."""


def sample(
    logits: NDArray[np.float32],
    sampling: SamplingRows,
    rows: NDArray[np.int64],
    num_generated: NDArray[np.int64],
    masks: TokenMasks | None = None,
) -> Sampled:
    """Sample one token for each row of the batch and count it for the row's penalties.

    logits: contiguous [batch, vocab], may be overwritten. rows: [batch], indices into `sampling`. num_generated:
    [batch], tokens that each row has generated before this one: the position in its random sequence.
    """
    batch = sampling.batch(rows, num_generated)._replace(masks=masks)
    return by_row(host_sampler().sample_tokens(logits, batch), batch.reports)


def mask_of(given: Mask | Masked | None) -> Mask | None:
    """Return a mask of `StepPlan.token_masks`, waiting for one that is being computed; None allows any token."""
    return given if given is None or isinstance(given, np.ndarray) else given.mask


def mask_rows(masks: list[Mask | None]) -> TokenMasks | None:
    """Return the masks of a batch's rows; None if there are none."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    return TokenMasks(np.array(rows), np.stack([mask for mask in masks if mask is not None])) if rows else None


def by_row(found: SampledTokens, reports: Reports | None) -> Sampled:
    """Return the results by row. `reports`: those of the sampled batch."""
    logprobs: dict[int, TokenLogprobs] = {}
    if reports is not None and found.logprobs is not None:
        entries = token_logprobs(found.token_ids[reports.rows], reports.widths, found.logprobs)
        reported = zip(reports.rows.tolist(), entries, strict=True)
        logprobs = {row: report for row, report in reported if found.finite[row]}
    return Sampled(found.token_ids, found.finite, logprobs)


def token_logprobs(token_ids: NDArray[np.int64], widths: NDArray[np.int64], logprobs: Logprobs) -> list[TokenLogprobs]:
    """Return for each row of `logprobs` its token first, then its own number of alternatives."""
    columns = zip(
        token_ids.tolist(),
        logprobs.chosen.tolist(),
        logprobs.top_ids.tolist(),
        logprobs.top.tolist(),
        widths.tolist(),
        logprobs.ranks.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs([token_id, *top_ids[:k]], [logprob, *top[:k]], rank)
        for token_id, logprob, top_ids, top, k, rank in columns
    ]

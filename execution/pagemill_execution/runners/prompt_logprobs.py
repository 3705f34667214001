"""Selects the rows of a step whose logits give log probabilities of prompt tokens, in pieces of bounded memory.

The scheduler (`pagemill_engine.scheduler.builder`) decides which tokens those are; the runner, which has the hidden
states, computes logits and log probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.sampling.sampler import token_logprobs
from pagemill_execution.step import PromptTargets, TokenLogprobs
from pagemill_kernels.sampling.batch import Logprobs, Reports

MIN_PIECE, MAX_PIECE = 16, 128


def piece_rows(max_num_seqs: int) -> int:
    """Return the rows of a piece: at most as many as sample in a step, for which memory is planned, but at least a
    few."""
    return min(max(max_num_seqs, MIN_PIECE), MAX_PIECE)


class PromptRows(NamedTuple):
    """The rows of a step to report, one entry per target."""

    rows: NDArray[np.int64]
    """Index among the step's tokens."""
    token_ids: NDArray[np.int64]
    num_top: NDArray[np.int64]

    @classmethod
    def of(cls, targets: Mapping[str, PromptTargets], starts: Mapping[str, int]) -> PromptRows:
        """Collect the rows of `targets`. `starts`: index of each request's first token in the step."""
        rows, token_ids, num_top = [], [], []
        for name, each in targets.items():
            count, first = len(each.token_ids), starts[name] + each.offset
            rows.append(np.arange(first, first + count))
            token_ids.append(np.array(each.token_ids, dtype=np.int64))
            num_top.append(np.full(count, each.num_top))
        return cls(np.concatenate(rows), np.concatenate(token_ids), np.concatenate(num_top))

    def pieces(self, num_rows: int) -> Iterator[PromptRows]:
        for at in range(0, len(self.rows), num_rows):
            yield PromptRows(*(each[at : at + num_rows] for each in self))

    @property
    def reports(self) -> Reports:
        """Report settings for logits that were computed for these rows only."""
        return Reports(np.arange(len(self.rows)), self.num_top)


def by_request(
    targets: Mapping[str, PromptTargets], pieces: Sequence[PromptRows], found: Sequence[Logprobs]
) -> dict[str, list[TokenLogprobs]]:
    """Group log probabilities by request. `found`: those of each piece."""
    entries = (
        entry
        for piece, logprobs in zip(pieces, found, strict=True)
        for entry in token_logprobs(piece.token_ids, piece.num_top, logprobs)
    )
    return {name: [next(entries) for _ in each.token_ids] for name, each in targets.items()}

"""The sampling settings of one step's rows as arrays, so that a device gets them in few copies.

Parameters that filter, scale or penalise are records (`columns`), of which this module names no column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.sampling.columns import Settings
from pagemill_kernels.sampling.filters import DRAWS

NUM_SETTINGS = len(DRAWS) + 2
"""Words of one draw on a device: its record and both halves of its key."""


class Draws(NamedTuple):
    """Parameters of the draws, by row of the batch."""

    settings: Settings
    """Records of `filters.DRAWS`."""
    keys: NDArray[np.uint64]
    """Keys from `randomness.keys`."""

    def at(self, rows: NDArray[np.int64]) -> Draws:
        return Draws(self.settings[rows], self.keys[rows])


class Edits(NamedTuple):
    """Numbers that are added to single logits; -inf forbids a token. No pair of row and token occurs twice."""

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    biases: NDArray[np.float32]


class TokenMasks(NamedTuple):
    """The tokens that rows may take; all others are forbidden."""

    rows: NDArray[np.int64]
    """No row occurs twice."""
    bits: NDArray[np.int32]
    """[rows, vocab / 32 rounded up]: one bit per token, lowest first; 1: allowed."""


class Penalties(NamedTuple):
    """Penalties of the rows that have any."""

    rows: NDArray[np.int64]
    settings: Settings
    """Records of `penalties.PENALTIES`."""
    count_rows: NDArray[np.int64]
    """Index of each row in the two tables below, which are in the sampling device's memory. None occurs twice but with
    `proposed`."""
    in_prompt: Any
    """bool [places, vocab]."""
    in_output: Any
    """int32 [places, vocab]: occurrences. Sampling adds the sampled tokens."""
    proposed: NDArray[np.int64] | None = None
    """The proposed token behind which a row samples, -1 for the first row of a request, which the others follow.

    It counts for the row and those that follow, and the row's token is added if all before it were sampled. Only
    devices sample such rows together; None: there are none."""


class NamedTokens(NamedTuple):
    """Tokens whose log probabilities are asked for by id, one entry each."""

    places: NDArray[np.int64]
    """Index of the report in `Reports`."""
    columns: NDArray[np.int64]
    """Index among the alternatives of the report."""
    token_ids: NDArray[np.int64]


class Reports(NamedTuple):
    """Rows that report log probabilities."""

    rows: NDArray[np.int64]
    num_top: NDArray[np.int64]
    """Number of most likely tokens to report besides the chosen one; 0 if tokens are named."""
    named: NamedTokens | None = None

    @property
    def widths(self) -> NDArray[np.int64]:
        """[reports]: number of alternatives of each."""
        if self.named is None:
            return self.num_top
        return self.num_top + np.bincount(self.named.places, minlength=len(self.rows))


class SamplingBatch(NamedTuple):
    draws: Draws | None = None
    """None: every row takes its best token."""
    edits: Edits | None = None
    penalties: Penalties | None = None
    reports: Reports | None = None
    masks: TokenMasks | None = None
    """Applied before edits and penalties."""

    @property
    def is_plain(self) -> bool:
        return all(part is None for part in self)

    def at(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """Return the settings of some rows, ascending, which include all with more than draws."""

        def placed(part: Any) -> Any:
            return None if part is None else part._replace(rows=np.searchsorted(rows, part.rows))

        draws = None if self.draws is None else self.draws.at(rows)
        return SamplingBatch(draws, *map(placed, (self.edits, self.penalties, self.reports, self.masks)))


class Logprobs(NamedTuple):
    """Log-softmax of the model's unchanged logits. Rows are those of `Reports`."""

    chosen: NDArray[np.float32]
    """[rows]."""
    ranks: NDArray[np.int64]
    """[rows]: 1 plus the number of tokens that are more likely than the chosen one."""
    top: NDArray[np.float32]
    """[rows, most of `widths`], descending, or in the order of named tokens.

    Values beyond a row's own number are meaningless.
    """
    top_ids: NDArray[np.int64]
    """[rows, most of `widths`]."""


class SampledTokens(NamedTuple):
    token_ids: NDArray[np.int64]
    """[batch]; an arbitrary token of the vocabulary where `finite` is False."""
    finite: NDArray[np.bool_]
    """[batch]; False if the model's logits contain NaN or infinity."""
    logprobs: Logprobs | None

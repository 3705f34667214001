"""What the rows of one step ask of the sampler: arrays, so that a device gets them in few copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Draws(NamedTuple):
    """Parameters of the draws, by row of the batch."""

    temperature: NDArray[np.float32]
    """0: the best token, and nothing below counts."""
    top_k: NDArray[np.int64]
    """The size of the vocabulary where all tokens are kept."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    keys: NDArray[np.uint64]
    """Keys made by `randomness.keys`."""

    def at(self, rows: NDArray[np.int64]) -> Draws:
        return Draws(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows])


class Edits(NamedTuple):
    """Numbers that are added to single logits, -inf to forbid a token. No pair of row and token occurs twice."""

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    biases: NDArray[np.float32]


class TokenMasks(NamedTuple):
    """Which tokens rows may take: all others are forbidden."""

    rows: NDArray[np.int64]
    """No row occurs twice."""
    bits: NDArray[np.int32]
    """[rows, vocab / 32 rounded up]: a bit for each token, the lowest first; 1: it is allowed."""


class Penalties(NamedTuple):
    """Penalties of the rows that have some: repetition over prompt and output, then frequency and presence over the
    output."""

    rows: NDArray[np.int64]
    repetition: NDArray[np.float32]
    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    count_rows: NDArray[np.int64]
    """Each row's place in the two tables below, which lie where logits are sampled. No row occurs twice."""
    in_prompt: Any
    """bool [places, vocab]."""
    in_output: Any
    """int32 [places, vocab]: occurrences. The sampled tokens are added to them."""


class NamedTokens(NamedTuple):
    """Tokens whose log probabilities are wanted by name: one entry each."""

    places: NDArray[np.int64]
    """The report's place in `Reports`."""
    columns: NDArray[np.int64]
    """Its place among the alternatives of the report."""
    token_ids: NDArray[np.int64]


class Reports(NamedTuple):
    """Rows whose log probabilities are wanted."""

    rows: NDArray[np.int64]
    num_top: NDArray[np.int64]
    """How many of the most likely tokens beside the chosen one; 0 where tokens are named."""
    named: NamedTokens | None = None

    @property
    def widths(self) -> NDArray[np.int64]:
        """[reports]: alternatives of each."""
        if self.named is None:
            return self.num_top
        return self.num_top + np.bincount(self.named.places, minlength=len(self.rows))


class SamplingBatch(NamedTuple):
    draws: Draws | None = None
    """`None`: every row takes its best token."""
    edits: Edits | None = None
    penalties: Penalties | None = None
    reports: Reports | None = None
    masks: TokenMasks | None = None
    """Applied before edits and penalties."""

    @property
    def is_plain(self) -> bool:
        return all(part is None for part in self)


class Logprobs(NamedTuple):
    """Log-softmax of the logits before any change: the model's own. Rows as in `Reports`."""

    chosen: NDArray[np.float32]
    """[rows]."""
    ranks: NDArray[np.int64]
    """[rows]: 1 and how many tokens are more likely than the chosen one."""
    top: NDArray[np.float32]
    """[rows, most of `widths`], falling, or as the tokens are named; what lies beyond a row's own number means
    nothing."""
    top_ids: NDArray[np.int64]
    """[rows, most of `widths`]."""


class SampledTokens(NamedTuple):
    token_ids: NDArray[np.int64]
    """[batch]; some token of the vocabulary where `finite` is false."""
    finite: NDArray[np.bool_]
    """False: the model's logits hold NaN or infinity."""
    logprobs: Logprobs | None

"""The attention inputs of a step as plain arrays, the same for every device and layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DECODE_LIMIT = 8
"""Most tokens of a request that a GPU treats as a decode (1, or more with speculation and short prompts)."""


def kv_heads_of(cache_heads: int) -> int:
    """Return the key/value heads of a layer whose cache stores so many vectors for each token: a key and a value of
    each head, or one latent that is both."""
    return max(1, cache_heads // 2)


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """A flattened batch: request i owns the tokens query_start_loc[i] to query_start_loc[i + 1]."""

    query_start_loc: NDArray[np.int64]
    """[requests + 1]."""
    seq_lens: NDArray[np.int64]
    """[requests]: context plus this step's tokens."""
    block_tables: NDArray[np.int32]
    """[requests, blocks]; entries past a request's length are never read."""
    block_size: int
    padding_block: int
    """Index of the padding block, which is filled with zeros: padded rows must read finite values."""
    first_key: int = field(default=0, kw_only=True)
    """Tokens of a context before this one are not attended to; 0 on GPUs. A row that sees no token has no result."""

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

"""Divides a batch for the CPU once per step: decodes into padded groups of similar length, prefill chunks one by one.

Padding costs memory traffic, and a group costs a fixed overhead in each layer; a batch is split if that saves more than
it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.paged_attention.reference import visible_positions

GROUP_OVERHEAD_TOKENS = 512
"""Padded tokens that another decode group must save."""


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Requests with one token each, padded to one length."""

    rows: slice | Tensor
    """Indices of their tokens in the batch."""
    num_requests: int
    blocks: Tensor
    """int64 [requests, blocks]: the padding block where a request has fewer."""
    bias: Tensor
    """[requests, 1, padded length]: 0 where visible, -inf elsewhere."""
    positions: NDArray[np.int64]
    """[requests, padded length]: positions of the gathered tokens."""
    seq_lens: NDArray[np.int64]
    """[requests]."""
    unwritten: tuple[Tensor, Tensor]
    """Requests and gathered places behind their last tokens, in blocks that they have."""

    def distances(self) -> Tensor:
        """Return the positions relative to each request's last token, float32 [requests, padded length], at most
        zero."""
        return torch.from_numpy(self.positions - (self.seq_lens[:, None] - 1)).float()


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """Several tokens of one request."""

    start: int
    stop: int
    context_len: int
    """Number of gathered tokens, including this chunk's."""
    blocks: Tensor
    """int64 [1, blocks]."""
    mask: Tensor | None
    """[chunk, context], added to the scores; None: plainly causal and no context before the chunk."""

    def distances(self) -> Tensor:
        """Return the positions of the context relative to each token of the chunk, float32 [chunk, context]."""
        own = torch.arange(self.context_len - (self.stop - self.start), self.context_len)
        return (torch.arange(self.context_len) - own[:, None]).float()


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]


def plan_attention(
    batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> AttentionPlan:
    """Plan attention for all layers with this sliding window (None: full attention)."""
    num_tokens = np.diff(batch.query_start_loc)
    singles = np.flatnonzero(num_tokens == 1)
    ordered = singles[np.argsort(batch.seq_lens[singles], kind="stable")]
    first_blocks = _first_blocks(batch, num_tokens, sliding_window)
    decodes = [
        _decode_group(batch, group, first_blocks, sliding_window, dtype)
        for group in _split(ordered, -(-batch.seq_lens[ordered] // batch.block_size), batch.block_size)
    ]
    prefills = [
        _prefill_chunk(batch, int(i), int(first_blocks[i]), sliding_window, dtype)
        for i in np.flatnonzero(num_tokens > 1)
    ]
    return AttentionPlan(decodes, prefills)


def _first_blocks(
    batch: AttentionBatch, num_tokens: NDArray[np.int64], sliding_window: int | None
) -> NDArray[np.int64]:
    """Return the index of the first block that any of a request's tokens can see."""
    if sliding_window is None:
        return np.zeros(batch.num_requests, dtype=np.int64)
    first_visible = np.maximum(batch.seq_lens - num_tokens - sliding_window + 1, 0)
    first_blocks: NDArray[np.int64] = first_visible // batch.block_size
    return first_blocks


def _split(requests: NDArray[np.int64], num_blocks: NDArray[np.int64], block_size: int) -> list[NDArray[np.int64]]:
    """Split requests (sorted by length) recursively where that saves the most padding."""
    if len(requests) == 0:
        return []
    saved = np.arange(1, len(requests)) * (num_blocks[-1] - num_blocks[:-1]) * block_size
    if len(saved) == 0 or saved.max() < GROUP_OVERHEAD_TOKENS:
        return [requests]
    cut = int(saved.argmax()) + 1
    return _split(requests[:cut], num_blocks[:cut], block_size) + _split(requests[cut:], num_blocks[cut:], block_size)


def _decode_group(
    batch: AttentionBatch,
    requests: NDArray[np.int64],
    first_blocks: NDArray[np.int64],
    sliding_window: int | None,
    dtype: torch.dtype,
) -> DecodeGroup:
    block_size = batch.block_size
    last_blocks = -(-batch.seq_lens[requests] // block_size)
    num_blocks = int((last_blocks - first_blocks[requests]).max())
    columns = first_blocks[requests, None] + np.arange(num_blocks)
    inside = columns < last_blocks[:, None]
    table = batch.block_tables[requests[:, None], np.where(inside, columns, 0)]
    table = np.where(inside, table, batch.padding_block)

    positions = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(len(requests), -1)
    lengths = batch.seq_lens[requests, None]
    visible = positions < lengths
    if sliding_window is not None:
        visible &= positions >= lengths - sliding_window
    visible &= positions >= batch.first_key
    unwritten = np.nonzero((positions >= lengths) & inside.repeat(block_size, axis=1))
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return DecodeGroup(
        rows=_as_slice(batch.query_start_loc[requests]),
        num_requests=len(requests),
        blocks=torch.from_numpy(table.astype(np.int64)),
        bias=bias[:, None, :],
        positions=positions,
        seq_lens=batch.seq_lens[requests],
        unwritten=(torch.from_numpy(unwritten[0]), torch.from_numpy(unwritten[1])),
    )


def _prefill_chunk(
    batch: AttentionBatch, request: int, first_block: int, sliding_window: int | None, dtype: torch.dtype
) -> PrefillChunk:
    start, stop = int(batch.query_start_loc[request]), int(batch.query_start_loc[request + 1])
    seq_len = int(batch.seq_lens[request])
    skipped = first_block * batch.block_size
    table = batch.block_tables[request : request + 1, first_block : -(-seq_len // batch.block_size)]
    return PrefillChunk(
        start=start,
        stop=stop,
        context_len=seq_len - skipped,
        blocks=torch.from_numpy(table.astype(np.int64)),
        mask=_prefill_mask(stop - start, seq_len - skipped, sliding_window, dtype, batch.first_key - skipped),
    )


def _prefill_mask(
    num_tokens: int, context_len: int, sliding_window: int | None, dtype: torch.dtype, first_key: int
) -> Tensor | None:
    if num_tokens == context_len and first_key <= 0 and (sliding_window is None or sliding_window >= context_len):
        return None
    positions = torch.arange(context_len - num_tokens, context_len)
    visible = visible_positions(positions, context_len, sliding_window)
    visible[:, : max(first_key, 0)] = False
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _as_slice(rows: NDArray[np.int64]) -> slice | Tensor:
    if len(rows) == 1 or bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)

"""An encoder on the CPU without torch: the native decoder over keys and values that live for one step.

Each layer writes its keys and values where the layer before had its own, and tokens attend as far ahead as back.
`on_torch.encoder` is the counterpart; `executing.encoder_runner` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagemill_engine.decoders.native.decoder import NativeDecoder
from pagemill_engine.decoders.native.parts import Ids
from pagemill_engine.decoders.step_model import CachedTokens, StepTokens
from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array
from pagemill_kernels.paged_attention.batch import AttentionBatch

BLOCK_SIZE = 16


class NativeEncoder:
    def __init__(self, decoder: NativeDecoder) -> None:
        declared = decoder.spec.decoder
        self._decoder = decoder
        self._windows = declared.windows()
        self._shapes = [(2 * each.num_kv_heads, BLOCK_SIZE, each.head_dim) for each in declared.attentions()]
        self.has_token_types = declared.embedding.token_types is not None

    @property
    def num_bytes(self) -> int:
        return self._decoder.num_bytes

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        return self._decoder.classifier

    def hidden(self, token_ids: Ids, lengths: Sequence[int], token_types: Ids | None) -> Array:
        """Return the hidden states of whole prompts one after another, float32 [tokens, hidden]."""
        sizes = np.array(lengths, dtype=np.int64)
        counts = -(-sizes // BLOCK_SIZE)
        first_blocks, starts = np.cumsum(counts) - counts, np.cumsum(sizes) - sizes
        positions = np.arange(len(token_ids)) - np.repeat(starts, sizes)
        slots = positions + np.repeat(first_blocks * BLOCK_SIZE, sizes)
        tables = (first_blocks[:, None] + np.arange(counts.max())).astype(np.int32)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        batch = AttentionBatch(ends, sizes, tables, BLOCK_SIZE, padding_block=0)
        widest = max(heads * BLOCK_SIZE * size for heads, _, size in self._shapes)
        memory, num_blocks = arrays.empty(int(counts.sum()) * widest), int(counts.sum())
        self._decoder.use_caches(
            [memory[: num_blocks * int(np.prod(shape))].reshape(num_blocks, *shape) for shape in self._shapes]
        )
        cached = CachedTokens(slots, batch)
        step = StepTokens(token_ids, positions, dict.fromkeys(self._windows, cached), token_types=token_types)
        return self._decoder.hidden(step)

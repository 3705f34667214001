"""The layout of KV cache blocks: kernels get the memory that block ids mean, and few blocks use little memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from pagemill_engine.executing.kv_cache import KVCache

SPEC: Any = SimpleNamespace(num_layers=30, cache_heads=6, head_dim=64)
BLOCK = 16


def cache_of(num_blocks: int) -> KVCache:
    return KVCache(SPEC, num_blocks, BLOCK, "float32")


def test_views_by_row_and_by_layer_are_the_same_memory() -> None:
    cache = cache_of(5)
    blocks = np.array([3, 0, 4], dtype=np.int32)
    for number, layer in enumerate(cache.layers):
        for block in blocks.tolist():
            layer[block] = 10 * number + block + 1
    for number, rows in enumerate(cache.rows):
        assert rows.flags.c_contiguous
        found = rows[cache.of_kinds[0].rows_of(blocks)]
        assert found[:, 0, 0, 0].tolist() == [10 * number + block + 1 for block in blocks.tolist()]
        assert not rows[cache.of_kinds[0].padding_row].any()


def test_a_slot_is_block_number_times_block_size_plus_offset() -> None:
    cache = cache_of(5)
    blocks, offsets = np.array([0, 2, 4], dtype=np.int32), np.array([15, 0, 7])
    expected = cache.of_kinds[0].rows_of(blocks).astype(np.int64) * BLOCK + offsets
    assert cache.of_kinds[0].row_slots_of(blocks.astype(np.int64) * BLOCK + offsets).tolist() == expected.tolist()


def test_one_block_does_not_touch_a_huge_page_in_every_layer() -> None:
    cache = cache_of(2500)
    before = psutil.Process().memory_info().rss
    for layer in cache.layers:
        layer[0] = 1.0
    assert psutil.Process().memory_info().rss - before < 10 << 20, "thirty huge pages would take 60 MiB"


def test_the_memory_is_released_with_the_cache() -> None:
    cache = cache_of(500)
    for layer in cache.layers:
        layer[:] = 1.0
    del layer
    full = psutil.Process().memory_info().rss
    cache.release()
    assert (cache.layers, cache.rows) == ([], [])
    assert full - psutil.Process().memory_info().rss > 0.8 * cache.num_bytes

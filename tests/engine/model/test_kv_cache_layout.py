"""The layout of KV cache blocks: kernels get the memory that block ids mean, and few blocks use little memory."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cut_kinds import with_blocks
from declared_families import NAMES, declared
from kv_machine import overlapped

from pagemill_execution.arena import end_of_ids
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_kernels.kv_store.kinds import KVType, token_bytes
from pagemill_models.spec.model_spec import ModelSpec, kinds_of
from pagemill_protocol.report.cache_kinds import CacheKind

SPEC: Any = SimpleNamespace(cache_shapes=[(6, 64)] * 30)
BLOCK = 16


def cache_of(num_blocks: int) -> KVCache:
    return KVCache(SPEC, num_blocks, BLOCK, "float32")


def test_layers_of_different_shapes_share_the_memory_of_a_block() -> None:
    spec: Any = SimpleNamespace(cache_shapes=[(4, 64), (2, 32), (4, 64)])
    kinds = (CacheKind(layers=(0, 2)), CacheKind("window-32", 32, layers=(1,)))
    cache = KVCache(spec, [5, 3], BLOCK, "int8", kinds)
    assert [layer.shape for layer in cache.layers] == [(6, 4, BLOCK, 68), (4, 2, BLOCK, 36), (6, 4, BLOCK, 68)]
    assert cache.num_bytes == 2 * 5 * 4 * BLOCK * 68 + 3 * 2 * BLOCK * 36
    for number, layer in enumerate(cache.layers):
        for block, each in enumerate(layer):
            assert each.flags.c_contiguous
            each[:] = 10 * number + block
    for number, layer in enumerate(cache.layers):
        assert [set(each.flat) for each in layer] == [{10 * number + block} for block in range(len(layer))]
    first, _, last = cache.layers
    assert first.strides[0] == last.strides[0] == 2 * first[0].nbytes, "a block of all layers of a kind is adjacent"


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
def test_the_bytes_of_every_familys_blocks_and_rows_are_those_of_the_arrays(kv_type: KVType) -> None:
    num_kinds = set()
    for name in NAMES:
        spec = ModelSpec(decoder=declared(name))
        if not spec.decoder.is_causal:
            continue
        kinds = kinds_of(spec.decoder, BLOCK, partial(token_bytes, kv_type), 4096)
        cache = KVCache(spec, [3] * len(kinds), BLOCK, kv_type, kinds, max_rows=5)
        for kind, own in zip(kinds, cache.of_kinds, strict=True):
            assert own.contents([0]).nbytes == kind.block_bytes, name
        logs = [array for each in cache.layers if not isinstance(each, np.ndarray) for array in (each.log, each.inputs)]
        assert sum(array.nbytes for array in logs) == 5 * kinds[-1].row_bytes, name
        num_kinds.add((len(kinds), kinds[-1].state))
    assert {(1, False), (2, False), (2, True)} <= num_kinds


def test_kinds_share_one_arena_in_which_their_border_moves() -> None:
    spec: Any = SimpleNamespace(cache_shapes=[(4, 64), (2, 32), (4, 64)])
    for layers in ((0, 2), (1,)), ((1,), (0, 2)):
        values = [BLOCK * heads * size for heads, size in spec.cache_shapes]
        sizes = [sum(4 * values[layer] for layer in own) for own in layers]
        kinds = [
            CacheKind(layers=layers[0], block_bytes=sizes[0]),
            CacheKind("window-32", 32, layers=layers[1], block_bytes=sizes[1]),
        ]
        cache = KVCache(spec, [5, 3], BLOCK, "float32", kinds, shares_memory=True)
        end, total = end_of_ids(kinds, [5, 3]), 5 * sizes[0] + 3 * sizes[1]
        low, high = cache.of_kinds
        for num_high in range(total // sizes[1] + 1):
            num_low = (total - num_high * sizes[1]) // sizes[0]
            mine, theirs = list(range(num_low)), list(range(end - num_high, end))
            for own, ids, value in ((low, mine, 1.0), (high, theirs, 2.0)):
                for layer in own.layers:
                    layer[ids] = value
            for own, ids, value in ((low, mine, 1.0), (high, theirs, 2.0)):
                assert all((layer[ids] == value).all() for layer in own.layers)
                assert all((layer[own.padding_block] == 0).all() for layer in own.layers)


@pytest.mark.parametrize("kv_type", ["float32", "int8"])
def test_kinds_of_a_device_share_one_arena_and_are_copied_at_once(kv_type: KVType) -> None:
    """A block of one kind goes where one of the other kind was that is copied in the same plan."""
    windows = SimpleNamespace(windows=lambda: {None, 32})
    spec: Any = SimpleNamespace(cache_shapes=[(4, 64), (2, 32), (4, 64)], decoder=windows)
    sizes = [BLOCK * heads * token_bytes(kv_type, size) for heads, size in spec.cache_shapes]
    full = CacheKind(layers=(1,), block_bytes=sizes[1])
    window = CacheKind("window-32", 32, layers=(0, 2), block_bytes=sizes[0] + sizes[2])
    counts = [40, 3]
    cache = DeviceKVCache(spec, counts, BLOCK, kv_type, torch.device("cpu"), [full, window])
    assert len({layer.untyped_storage().data_ptr() for layer in cache.layers}) == 1
    assert [len(layer) - 1 for layer in cache.layers] == [cache.padding_blocks[kind] for kind in (1, 0, 1)]
    end = end_of_ids([full, window], counts)
    cache.layers[1][:40] = 1
    for layer in (cache.layers[0], cache.layers[2]):
        layer[end - 3 : end] = 2
    assert bool((cache.layers[1][:40] == 1).all())
    _, taken = next(overlapped([full, window], counts, 1, end - 4))
    cache.layers[1][taken] = 3
    cache.copy_blocks([[(taken, 0)], [(end - 1, end - 4)]])
    assert all(bool((cache.layers[layer][end - 4] == 2).all()) for layer in (0, 2))
    cache.copy_blocks([[(0, taken)], [(end - 4, end - 2)]])
    assert bool((cache.layers[1][taken] == 3).all())
    assert all(bool((cache.layers[layer][end - 2] == 2).all()) for layer in (0, 2))
    assert not bool(cache.layers[1][cache.padding_blocks[0]].any())
    assert not bool(cache.layers[0][cache.padding_blocks[1]].any())


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 7])
@pytest.mark.parametrize("counts", [(7, 3), (8, 5), (9, 9)], ids=str)
def test_a_scheduler_with_fewer_blocks_has_no_two_in_the_same_bytes(counts: tuple[int, int], num_blocks: int) -> None:
    spec: Any = SimpleNamespace(cache_shapes=[(2, 32), (2, 80)])
    kinds = [
        CacheKind(layers=(0,), block_bytes=4 * BLOCK * 2 * 32),
        CacheKind("window-32", 32, layers=(1,), block_bytes=4 * BLOCK * 2 * 80),
    ]
    cache = KVCache(spec, counts, BLOCK, "float32", kinds, shares_memory=True)
    info = RunnerInfo(counts[0], BLOCK, 99, 99, "weights", "kv", 0, 0, "none")
    cut = with_blocks(
        info._replace(kinds=tuple(kinds), kind_blocks=counts, shares_memory=True), num_blocks
    ).blocks_of_kinds
    end = end_of_ids(kinds, cut)
    ids = (list(range(cut[0])), list(range(end - cut[1], end)))
    for own, numbers, value in zip(cache.of_kinds, ids, (1.0, 2.0), strict=True):
        own.layers[0][numbers] = value
    for own, numbers, value in zip(cache.of_kinds, ids, (1.0, 2.0), strict=True):
        assert (own.layers[0][numbers] == value).all()


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
    assert (cache.layers, cache.of_kinds) == ([], [])
    assert full - psutil.Process().memory_info().rss > 0.8 * cache.num_bytes

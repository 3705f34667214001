"""Tile sizes of attention: they suit every supported shape and need less on devices with little shared memory."""

from __future__ import annotations

import pytest
import torch

from pagemill_kernels.gpu import launch
from pagemill_kernels.paged_attention.tiles import choose_tiles
from pagemill_kernels.paged_attention.triton_launch import MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM

DEVICES = {"A100": ((8, 0), 163), "L4": ((8, 9), 99), "H100": ((9, 0), 227), "B200": ((10, 0), 227)}
DEVICES |= {"RTX 5090": ((12, 0), 99)}
CACHED = (None, torch.int8, torch.float8_e4m3fn)


def be(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    capability, shared_kib = DEVICES[name]
    monkeypatch.setattr(launch, "capability", lambda: capability)
    monkeypatch.setattr(launch, "shared_bytes", lambda: shared_kib * 1024)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cached", CACHED)
def test_a_block_of_rows_contains_a_token_of_every_group(
    name: str, dtype: torch.dtype, cached: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, name)
    for head_dim in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, 16):
        for group in range(1, MAX_GROUP + 1):
            for is_decode in (True, False):
                tiles = choose_tiles(head_dim, group, dtype, cached or dtype, is_decode)
                assert tiles.block_m >= max(group, 16)
                assert all(size & (size - 1) == 0 for size in tiles[:3]), "arange requires powers of two"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_decode", [True, False])
def test_more_keys_are_prefetched_if_shared_memory_allows(
    head_dim: int, is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {}
    for name in DEVICES:
        be(monkeypatch, name)
        stages[name] = choose_tiles(head_dim, 4, torch.bfloat16, torch.bfloat16, is_decode).num_stages
    assert stages == {"A100": 2, "L4": 2, "H100": 3, "B200": 3, "RTX 5090": 2}

"""Sizes of the attention kernels on a GPU: tiles, warps, stages, and the number of splits of long contexts.

They follow from shapes, types and the device: multiprocessors, shared memory per program, and the compute capability
where that memory is the same. Those of devices with 227 KiB were timed on an H100 with heads of 128 (`docs/log.md`,
2026-11-26); those of smaller devices are chosen so that nothing spills and 99 KiB suffice
(`bench/kernel_resources.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store.storage import LARGEST_CODES

LARGE_SHARED_BYTES = 227 * 1024
"""Shared memory of H100, B200 and similar devices, whose tensor cores also read it, which leaves more registers
free."""
TENSOR_MEMORY_CAPABILITY = (10, 0)
"""Capability from which on results of 128 rows move from tensor memory to registers whole, too many with 8-bit
caches."""
SPLIT_TOKENS = 256
"""Fewest tokens of a split: joining shorter ones costs more than they save."""
SPLITS = (1, 4, 16, 32)
"""Possible numbers of splits; there are few, because each is a separate kernel."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Approximate number of decode-attention programs that run on one multiprocessor."""


class AttentionTiles(NamedTuple):
    """The sizes of one compiled kernel."""

    block_m: int
    """Rows of a Q block: tokens times the query heads of a group."""
    tile: int
    """Keys that are read at a time."""
    num_warps: int
    num_stages: int
    """Tiles that are being loaded at a time."""


def choose_tiles(head_dim: int, group: int, dtype: torch.dtype, cached: torch.dtype, is_decode: bool) -> AttentionTiles:
    """Choose the sizes of a kernel.

    Decodes are bound by memory: they take the fewest rows of a tensor-core operation and load many keys at a time.
    Prefills take as many rows as fit into registers together with a second program on the same multiprocessor. 8-bit
    values take additional registers while they are converted to floats.
    """
    rows = max(16, triton.next_power_of_2(group))
    is_large = launch.shared_bytes() >= LARGE_SHARED_BYTES
    if head_dim > 256:
        if dtype == torch.float32:
            return AttentionTiles(rows, 16, 8, 1)
        return AttentionTiles(rows, 32, 8, 1) if is_decode else AttentionTiles(max(rows, 32), 16, 8, 1)
    if dtype == torch.float32 and head_dim > 128:
        return AttentionTiles(rows, 16, 4, 2) if is_decode else AttentionTiles(max(rows, 32), 16, 8, 2)
    has_codes = cached in LARGEST_CODES
    if dtype == torch.float32 or head_dim > 128:
        # With 2 stages wide 8-bit caches spill on a B200.
        stages = 3 if is_decode and is_large and has_codes and dtype != torch.float32 else 2
        return AttentionTiles(rows, 32, 4, stages) if is_decode else AttentionTiles(64, 32, 8, stages)
    if is_decode:
        return _decode_tiles(rows, has_codes, is_large)
    return _prefill_tiles(head_dim, group, has_codes, is_large)


def _decode_tiles(rows: int, has_codes: bool, is_large: bool) -> AttentionTiles:
    if not is_large:
        return AttentionTiles(rows, 64, 4, 2)
    if has_codes:
        # 128 8-bit keys are as many bytes as 64 floats; their scores take registers too, which more rows need.
        return AttentionTiles(rows, 128 if rows == 16 else 64, 4, 2)
    # With few requests (a program or two per multiprocessor) 3 stages are a sixth faster than 2; with many 1 % slower.
    return AttentionTiles(rows, 64, 4, 3)


def _prefill_tiles(head_dim: int, group: int, has_codes: bool, is_large: bool) -> AttentionTiles:
    if has_codes:
        # 64 rows with as many keys and 4 warps are 2 to 6 % faster on an H100, but spill.
        if is_large and launch.capability() < TENSOR_MEMORY_CAPABILITY:
            return AttentionTiles(128, 64, 8, 2)
        return AttentionTiles(64, 32, 4, 3 if head_dim <= 64 else 2)
    if not is_large:
        # With 64 keys ALiBi spills.
        return AttentionTiles(128, 32, 8, 2)
    # With large groups whole tokens fill 64 rows badly.
    return AttentionTiles(64, 64, 4, 3) if group <= 16 else AttentionTiles(128, 64, 8, 3)


def choose_splits(num_programs: int) -> int:
    """Choose enough splits to occupy the device, from the launch's shape alone."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * launch.num_multiprocessors() // max(num_programs, 1)
    return max(splits for splits in SPLITS if splits == 1 or splits <= wanted)

"""Sizes of the attention kernels on a GPU: tiles, warps, stages, and into how many parts long contexts are cut.

All of them follow from shapes, types and what the device has: multiprocessors, the shared memory that a program may
have, and its compute capability where that memory is the same. Those of devices with 227 KiB were timed on an H100 with
heads of 128 (`docs/log.md`, 2026-11-26), those of smaller ones are such that nothing spills and 99 KiB hold them
(`bench/kernel_resources.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store.storage import LARGEST_CODES

LARGE_SHARED_BYTES = 227 * 1024
"""Of H100, B200 and their like, whose products also read shared memory: more registers are free there."""
TENSOR_MEMORY_CAPABILITY = (10, 0)
"""Products of 128 rows come from tensor memory to registers whole: with codes these do not hold them."""
SPLIT_TOKENS = 256
"""A part of a split context is at least this long: shorter ones cost more to join than they save."""
SPLITS = (1, 4, 16, 32)
"""Parts that a context may be cut into; few values, because each is a kernel of its own."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs of decode attention that one multiprocessor holds, about."""


class Tiles(NamedTuple):
    """One compiled kernel's sizes."""

    block_m: int
    """Rows of a Q block: tokens times the query heads of a group."""
    tile: int
    """Keys that are read at a time."""
    num_warps: int
    num_stages: int
    """Tiles that are on their way at a time."""


def choose_tiles(head_dim: int, group: int, dtype: torch.dtype, cached: torch.dtype, is_decode: bool) -> Tiles:
    """Decodes are bound by memory: the fewest rows that a product takes, and many keys on their way. Prefills: as many
    rows as registers hold beside a second program on the same multiprocessor.

    Codes take registers of their own on their way to floats.
    """
    rows = max(16, triton.next_power_of_2(group))
    is_large = launch.shared_bytes() >= LARGE_SHARED_BYTES
    if dtype == torch.float32 and head_dim > 128:
        return Tiles(rows, 16, 4, 2) if is_decode else Tiles(max(rows, 32), 16, 8, 2)
    has_codes = cached in LARGEST_CODES
    if dtype == torch.float32 or head_dim > 128:
        # With 2 stages wide codes spill on a B200.
        stages = 3 if is_decode and is_large and has_codes and dtype != torch.float32 else 2
        return Tiles(rows, 32, 4, stages) if is_decode else Tiles(64, 32, 8, stages)
    if is_decode:
        return _decode_tiles(rows, has_codes, is_large)
    return _prefill_tiles(head_dim, group, has_codes, is_large)


def _decode_tiles(rows: int, has_codes: bool, is_large: bool) -> Tiles:
    if not is_large:
        return Tiles(rows, 64, 4, 2)
    if has_codes:
        # 128 keys of codes are as many bytes as 64 of floats; their scores take registers too, which more rows need.
        return Tiles(rows, 128 if rows == 16 else 64, 4, 2)
    # Few requests, a program or two for each multiprocessor, are a sixth faster than with 2 stages; many 1 % slower.
    return Tiles(rows, 64, 4, 3)


def _prefill_tiles(head_dim: int, group: int, has_codes: bool, is_large: bool) -> Tiles:
    if has_codes:
        # 64 rows with as many keys and 4 warps are 2 to 6 % faster on an H100, and spill.
        if is_large and launch.capability() < TENSOR_MEMORY_CAPABILITY:
            return Tiles(128, 64, 8, 2)
        return Tiles(64, 32, 4, 3 if head_dim <= 64 else 2)
    if not is_large:
        # With 64 keys ALiBi spills.
        return Tiles(128, 32, 8, 2)
    # Whole tokens fill 64 rows badly where a group is large.
    return Tiles(64, 64, 4, 3) if group <= 16 else Tiles(128, 64, 8, 3)


def choose_splits(num_programs: int) -> int:
    """Enough parts to occupy the device; from the launch's shape alone."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * launch.num_multiprocessors() // max(num_programs, 1)
    return max(splits for splits in SPLITS if splits == 1 or splits <= wanted)

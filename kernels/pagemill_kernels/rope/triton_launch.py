"""Launches rotation and cache write as one kernel, with or without norms of queries and keys; float32, rounded once."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store.storage import LARGEST_CODES, token_width
from pagemill_kernels.rope import triton_body
from pagemill_kernels.rope.reference import HeadNorms

PROGRAM_ELEMENTS = 1024
"""Elements of one half of the heads that a program rotates."""


def rope_and_store(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Rotate queries and keys in place, then write keys and values into the cache.

    heads: [tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous. cos, sin: [tokens, 1, head_dim / 2],
    contiguous. cache: one layer's, each block contiguous, of any type of `kv_store.storage`. slots: int64 [tokens],
    block id * block_size + offset.
    """
    _launch(heads, num_heads, None, cos, sin, cache, slots)


def norm_rope_and_store(
    heads: Tensor, num_heads: int, norms: HeadNorms, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Normalise each query and key (RMS), then do as `rope_and_store`, all in place."""
    _launch(heads, num_heads, norms, cos, sin, cache, slots)


def _launch(
    heads: Tensor, num_heads: int, norms: HeadNorms | None, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    num_tokens, width, head_dim = heads.shape
    num_kv_heads = (width - num_heads) // 2
    _check_norms(heads, norms)
    _check(heads, num_heads, cos, sin, cache, slots)
    if num_tokens == 0:
        return
    has_codes = cache.dtype in LARGEST_CODES
    padded_half = triton.next_power_of_2(head_dim // 2)
    heads_per_program = min(triton.next_power_of_2(width), max(1, PROGRAM_ELEMENTS // padded_half))
    triton_body.rope_and_store[(num_tokens, triton.cdiv(width, heads_per_program))](
        heads_ptr=heads,
        query_weight_ptr=heads if norms is None else norms.query_weight,
        key_weight_ptr=heads if norms is None else norms.key_weight,
        eps=0.0 if norms is None else norms.eps,
        cos_ptr=cos,
        sin_ptr=sin,
        cache_ptr=cache,
        cache_scales_ptr=cache[0].flatten().view(torch.float32) if has_codes else cache,
        slots_ptr=slots,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_HALF=padded_half,
        HEADS_PER_PROGRAM=heads_per_program,
        HAS_NORMS=norms is not None,
        BLOCK_SIZE=cache.shape[2],
        BLOCK_STRIDE=cache.stride(0),
        HAS_CODES=has_codes,
        LARGEST=LARGEST_CODES.get(cache.dtype, 0.0),
        IS_FP8=cache.dtype == torch.float8_e4m3fn,
        enable_fp_fusion=True,
        num_warps=4,
    )


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values without a rotation: angles are zero, and all finite values stay as they are."""
    angles = (len(heads), 1, heads.shape[2] // 2)
    rope_and_store(heads, num_heads, heads.new_ones(angles), heads.new_zeros(angles), cache, slots)


def _check_norms(heads: Tensor, norms: HeadNorms | None) -> None:
    if norms is None:
        return
    weights = {"query_weight": norms.query_weight, "key_weight": norms.key_weight}
    launch.check_floats("rope", heads=heads, **weights)
    launch.check_contiguous("rope", **weights)
    for name, weight in weights.items():
        launch.check_shape("rope", name, weight, (heads.shape[2],))


def _check(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    num_tokens, width, head_dim = heads.shape
    floats = {} if cache.dtype in LARGEST_CODES else {"cache": cache}
    launch.check_floats("rope", heads=heads, cos=cos, sin=sin, **floats)
    launch.check_contiguous("rope", heads=heads, cos=cos, sin=sin, slots=slots)
    launch.check_blocks("rope", cache)
    for name, table in (("cos", cos), ("sin", sin)):
        launch.check_shape("rope", name, table, (num_tokens, 1, head_dim // 2))
    launch.check_shape("rope", "slots", slots, (num_tokens,))
    shape = (len(cache), width - num_heads, cache.shape[2], token_width(cache.dtype, head_dim))
    launch.check_shape("rope", "cache", cache, shape)
    if slots.dtype != torch.int64:
        raise ValueError(f"rope: slots are {slots.dtype}; int64 is needed")

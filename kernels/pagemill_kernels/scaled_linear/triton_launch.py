"""Linear layers in int8 or e4m3 on a GPU: one launch quantizes x, one multiplies.

Packing moves the weight to the device and quantizes it there; the caller drops its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.linear.triton_launch import CodesOnDevice, gather_codes
from pagemill_kernels.scaled_linear import triton_body
from pagemill_kernels.scaled_linear.channels import LARGEST, SMALLEST_SCALE, ChannelCodes, quantize_channels

ENCODE_BLOCK = 16384
"""Inputs of a row that fit into a program's registers; longer rows are read twice."""
BAND = 8


class ScaledTiles(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ScaledLinear(CodesOnDevice):
    """A linear layer that quantizes activations too."""

    def __init__(self, weight: ChannelCodes, bias: Tensor | None) -> None:
        """Build the layer. `weight` is on the device."""
        self.out_features, self.in_features = weight.codes.shape
        self._codes, self._scales = weight.codes.contiguous(), weight.scales.contiguous()
        self._bias = None if bias is None else launch.to_device(bias)

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, float32 [..., in]. ids: int64 [...], each below out_features."""
        # A row is one run of all its inputs, and one group.
        return gather_codes(ids, self._codes, self._scales, None, (self.in_features, self.in_features, 1, 8))

    def _multiply(self, x: Tensor, out: Tensor, *, accumulates: bool) -> None:
        launch.check_floats("scaled linear", x=x, out=out)
        launch.check_contiguous("scaled linear", out=out)
        if x.shape[-1] != self.in_features or x.stride(-1) != 1:
            raise ValueError(
                f"scaled linear: x is {list(x.shape)} with strides {list(x.stride())}; "
                f"rows of {self.in_features} neighbouring elements are needed"
            )
        launch.check_shape("scaled linear", "out", out, (*x.shape[:-1], self.out_features))
        x = x.reshape(-1, self.in_features)
        if out.numel() == 0:
            return
        codes, scales = encode_rows(x, self._codes.dtype)
        tiles = choose_tiles(len(x))
        num_programs = triton.cdiv(len(x), tiles.block_m) * triton.cdiv(self.out_features, tiles.block_n)
        triton_body.multiply_scaled[(num_programs,)](
            num_rows=len(x),
            x_ptr=codes,
            x_scales_ptr=scales,
            codes_ptr=self._codes,
            scales_ptr=self._scales,
            bias_ptr=self._scales if self._bias is None else self._bias,
            out_ptr=out,
            OUT=self.out_features,
            IN=self.in_features,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            BAND=BAND,
            IS_FP8=codes.dtype == torch.float8_e4m3fn,
            HAS_BIAS=self._bias is not None,
            ACCUMULATES=accumulates,
            enable_fp_fusion=True,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def encode_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return quantized rows, [rows, size], and float32 scales [rows].

    x: float [rows, size], neighbouring elements adjacent.
    """
    launch.check_floats("scaled linear", x=x)
    num_rows, size = x.shape
    codes = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return codes, scales
    block = min(triton.next_power_of_2(size), ENCODE_BLOCK)
    triton_body.encode_rows[(num_rows,)](
        x_ptr=x,
        x_stride=x.stride(0),
        codes_ptr=codes,
        scales_ptr=scales,
        SIZE=size,
        BLOCK=block,
        LARGEST=LARGEST[dtype],
        SMALLEST=SMALLEST_SCALE,
        IS_FP8=dtype == torch.float8_e4m3fn,
        enable_fp_fusion=True,
        num_warps=min(16, max(4, block // 1024)),
    )
    return codes, scales


def choose_tiles(num_rows: int) -> ScaledTiles:
    """Choose tiles like `linear.triton_launch`; a tile's stages fit into the 99 KiB of the smallest multiprocessors."""
    if num_rows <= 16:
        return ScaledTiles(16, 32, 256, 4, 4)
    if num_rows <= 64:
        return ScaledTiles(64, 64, 128, 4, 4)
    return ScaledTiles(128, 128, 128, 8, 3)


def pack_w8a8(weight: Tensor, bias: Tensor | None) -> ScaledLinear:
    """Pack a layer of int8 weights and activations. weight: float [out, in]; bias: [out]."""
    return _pack(weight, bias, torch.int8)


def pack_fp8(weight: Tensor, bias: Tensor | None) -> ScaledLinear:
    """Pack a layer of e4m3 weights and activations. Raises ValueError on a device without e4m3."""
    problem = launch.fp8_problem()
    if problem is not None:
        raise ValueError(f"scaled linear: {problem}; int8 is multiplied there")
    return _pack(weight, bias, torch.float8_e4m3fn)


def _pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> ScaledLinear:
    launch.check_floats("scaled linear", weight=weight)
    return ScaledLinear(quantize_channels(launch.to_device(weight), dtype), bias)

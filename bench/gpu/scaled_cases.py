"""Matmuls of 8-bit weights with 8-bit activations, and the quantization of activations, compared with torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case import TOLERANCE, Case, Run
from measuring import Device

from pagemill_kernels.gpu import launch
from pagemill_kernels.scaled_linear import channels, reference
from pagemill_kernels.scaled_linear import triton_launch as scaled
from pagemill_kernels.scaled_linear.channels import ChannelCodes, quantize_channels

FP8_STEP = 0.08
"""Rounding may choose either of two neighbouring codes, and the two largest e4m3 values differ by this share."""


def cases(device: Device, shape: tuple[int, int], rows: list[int]) -> list[Case]:
    types = {"int8": torch.int8}
    if launch.fp8_problem() is None:
        types["fp8"] = torch.float8_e4m3fn
    floats = device.random(*shape, seed=2) / 50
    found = []
    for name, dtype in types.items():
        weight = quantize_channels(floats, dtype)
        found += [_codes(device, name, num_rows, shape[1], dtype) for num_rows in rows[-1:]]
        found += [_product(device, name, num_rows, weight, floats) for num_rows in rows]
    return found


def _codes(device: Device, name: str, rows: int, size: int, dtype: torch.dtype) -> Case:
    x = device.random(rows, size, seed=4)
    return Case(
        f"codes of rows, {name}, {rows} x {size}",
        lambda: scaled.encode_rows(x, dtype)[0],
        lambda: channels.encode_rows(x, dtype)[0],
        num_bytes=x.nbytes + x.numel() + 4 * rows,
        tolerance=TOLERANCE if dtype == torch.int8 else FP8_STEP,
    )


def _product(device: Device, name: str, rows: int, weight: ChannelCodes, floats: torch.Tensor) -> Case:
    x, ours = device.random(rows, floats.shape[1], seed=4), scaled.ScaledLinear(weight, None)
    return Case(
        f"product, {name} by {name}, {rows} x {floats.shape[1]} x {floats.shape[0]}",
        lambda: ours(x),
        lambda: reference.multiply(x, weight, None),
        num_bytes=ours.num_bytes + x.nbytes + rows * floats.shape[0] * x.itemsize,
        num_flops=2 * rows * floats.numel(),
        peers={"torch, bfloat16": lambda: F.linear(x, floats), "torch, codes given": _of_codes(x, weight)},
    )


def _of_codes(x: torch.Tensor, weight: ChannelCodes) -> Run:
    """Return torch's matmul of already quantized values; for int8 the scales are a launch of their own."""
    codes, scales = channels.encode_rows(x, weight.codes.dtype)
    transposed = weight.codes.t()

    def fp8() -> torch.Tensor:
        return torch._scaled_mm(codes, transposed, scales[:, None], weight.scales[None], out_dtype=x.dtype)

    def int8() -> torch.Tensor:
        return (torch._int_mm(codes, transposed) * scales[:, None] * weight.scales).to(x.dtype)

    return int8 if weight.codes.dtype == torch.int8 else fp8

"""The formula: quantizes rows of x, multiplies exactly, then applies both scales and the bias in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.scaled_linear.channels import ChannelCodes, encode_rows, quantize_channels


def multiply(x: Tensor, weight: ChannelCodes, bias: Tensor | None) -> Tensor:
    """Return float32 [rows, out]. x: float [rows, in]."""
    codes, scales = encode_rows(x, weight.codes.dtype)
    # float64 represents every sum of products of two 8-bit values exactly.
    sums = (codes.double() @ weight.codes.double().t()).float()
    result = sums * scales[:, None] * weight.scales
    return result if bias is None else result + bias.float()


class ScaledReference:
    can_gather = True

    def __init__(self, weight: ChannelCodes, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self._weight, self._bias).to(x.dtype)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        out.copy_(out.float() + multiply(x, self._weight, self._bias))

    def gather(self, ids: Tensor) -> Tensor:
        return self._weight.dequantize()[ids]


def pack_w8a8(weight: Tensor, bias: Tensor | None) -> ScaledReference:
    """Pack an int8 layer. weight: float [out, in]; bias: [out]."""
    return ScaledReference(quantize_channels(weight, torch.int8), bias)


def pack_fp8(weight: Tensor, bias: Tensor | None) -> ScaledReference:
    """Pack an e4m3 layer. weight: float [out, in]; bias: [out]."""
    return ScaledReference(quantize_channels(weight, torch.float8_e4m3fn), bias)

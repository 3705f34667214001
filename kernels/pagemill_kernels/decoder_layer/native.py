"""One C++ call a layer instead of nine, with the same bits; float32 arithmetic."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch, library
from pagemill_kernels.decoder_layer.parts import LayerParts
from pagemill_kernels.kv_store.storage import NATIVE_TYPES
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.paged_attention.native import NativePlan

MLP_ROWS = 128
"""Tokens that layer.cpp takes through the MLP at a time."""


class NativeLayer:
    def __init__(self, parts: LayerParts) -> None:
        """All packed layers are `NativeLinear`s."""
        qkv, output = _native(parts.qkv), _native(parts.output)
        gate_up, down = _native(parts.gate_up), _native(parts.down)
        self._parts = parts
        """Keeps alive what the addresses below point to."""
        self._weights = library.LayerWeights(
            qkv=qkv.address,
            output=output.address,
            gate_up=gate_up.address,
            down=down.address,
            qkv_bias=qkv.bias_address,
            output_bias=output.bias_address,
            gate_up_bias=gate_up.bias_address,
            down_bias=down.bias_address,
            attention_norm=parts.attention_norm.data_ptr(),
            mlp_norm=parts.mlp_norm.data_ptr(),
            query_norm=None if parts.query_norm is None else parts.query_norm.data_ptr(),
            key_norm=None if parts.key_norm is None else parts.key_norm.data_ptr(),
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            eps=parts.eps,
            scale=parts.scale,
        )
        self._address = ctypes.byref(self._weights)
        self._hidden_size = qkv.in_features
        self._heads = qkv.out_features + output.in_features
        self._inner = gate_up.out_features + down.in_features
        self._layer = launch.native().pagemill_decoder_layer

    def __call__(
        self, hidden: Tensor, plan: NativePlan, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        num_tokens = len(hidden)
        if hidden.shape[1] != self._hidden_size or hidden.dtype != torch.float32 or not hidden.is_contiguous():
            raise ValueError(
                f"layer: hidden is {hidden.dtype} {list(hidden.shape)}, contiguous float32 "
                f"[tokens, {self._hidden_size}] is needed"
            )
        block = min(num_tokens, MLP_ROWS)
        scratch = torch.empty(num_tokens * self._hidden_size + max(num_tokens * self._heads, block * self._inner))
        self._layer(
            self._address,
            ctypes.byref(plan.args),
            hidden.data_ptr(),
            num_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            cache.data_ptr(),
            NATIVE_TYPES.index(cache.dtype),
            slots.data_ptr(),
            scratch.data_ptr(),
        )


def fuse_layer(parts: LayerParts) -> NativeLayer:
    return NativeLayer(parts)


def _native(linear: PackedLinear) -> NativeLinear:
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"layer: {type(linear).__name__} is not packed by the native kernels")
    return linear

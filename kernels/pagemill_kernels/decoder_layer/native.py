"""One C++ call for all layers instead of nine for each, with the same bits; float32 arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


class NativeLayers:
    def __init__(self, layers: Sequence[LayerParts]) -> None:
        """At least one; all packed parts are `NativeLinear`s."""
        packed = [_packed(parts) for parts in layers]
        weights = [_weights(parts, linears) for parts, linears in zip(layers, packed, strict=True)]
        self._kept = layers, weights
        """What the addresses below point to."""
        self._addresses = _addresses(map(ctypes.addressof, weights))
        self._hidden_size = packed[0].qkv.in_features
        self._heads = max(each.qkv.out_features + each.output.in_features for each in packed)
        self._inner = max(each.gate_up.out_features + each.down.in_features for each in packed)
        self._call = launch.native().pagemill_decoder_layers

    def __call__(
        self,
        hidden: Tensor,
        plans: Sequence[NativePlan],
        cos: Tensor,
        sin: Tensor,
        caches: Sequence[Tensor],
        slots: Tensor,
    ) -> None:
        num_tokens = len(hidden)
        if hidden.shape[1] != self._hidden_size or hidden.dtype != torch.float32 or not hidden.is_contiguous():
            raise ValueError(
                f"layers: hidden is {hidden.dtype} {list(hidden.shape)}, contiguous float32 "
                f"[tokens, {self._hidden_size}] is needed"
            )
        if not len(plans) == len(caches) == len(self._addresses):
            raise ValueError(f"layers: {len(plans)} plans and {len(caches)} caches for {len(self._addresses)} layers")
        block = min(num_tokens, MLP_ROWS)
        scratch = torch.empty(num_tokens * self._hidden_size + max(num_tokens * self._heads, block * self._inner))
        self._call(
            len(self._addresses),
            self._addresses,
            _addresses(ctypes.addressof(plan.args) for plan in plans),
            _addresses(cache.data_ptr() for cache in caches),
            hidden.data_ptr(),
            num_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            NATIVE_TYPES.index(caches[0].dtype),
            slots.data_ptr(),
            scratch.data_ptr(),
        )


def fuse_layers(layers: Sequence[LayerParts]) -> NativeLayers:
    return NativeLayers(layers)


class _Packed(NamedTuple):
    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear


def _packed(parts: LayerParts) -> _Packed:
    return _Packed(_native(parts.qkv), _native(parts.output), _native(parts.gate_up), _native(parts.down))


def _weights(parts: LayerParts, packed: _Packed) -> library.LayerWeights:
    return library.LayerWeights(
        qkv=packed.qkv.address,
        output=packed.output.address,
        gate_up=packed.gate_up.address,
        down=packed.down.address,
        qkv_bias=packed.qkv.bias_address,
        output_bias=packed.output.bias_address,
        gate_up_bias=packed.gate_up.bias_address,
        down_bias=packed.down.bias_address,
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


def _addresses(values: Iterable[int]) -> ctypes.Array[ctypes.c_void_p]:
    listed = list(values)
    return (ctypes.c_void_p * len(listed))(*listed)


def _native(linear: PackedLinear) -> NativeLinear:
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"layers: {type(linear).__name__} is not packed by the native kernels")
    return linear

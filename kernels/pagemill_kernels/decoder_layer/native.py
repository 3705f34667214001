"""One C++ call for all layers instead of nine and more for each, with the same bits; float32 arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch, library
from pagemill_kernels.decoder_layer.parts import LayerParts, MLPParts, MoEParts, NormParts
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.kv_store.storage import NATIVE_TYPES
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.paged_attention.native import NativePlan

MLP_ROWS = 128
"""Tokens that layer.cpp takes through the MLP at a time."""


class NativeLayers:
    def __init__(self, layers: Sequence[LayerParts]) -> None:
        """At least one; all packed parts are `NativeLinear`s or `NativeExperts`."""
        made = [_Weights(parts) for parts in layers]
        self._kept = layers, made
        """What the addresses below point to."""
        self._addresses = launch.addresses(ctypes.addressof(each.layer) for each in made)
        self._hidden_size = made[0].hidden_size
        self._heads = max(each.heads_size for each in made)
        self._inner = max(each.inner_size for each in made)
        self._call = launch.native().pagemill_decoder_layers

    def __call__(
        self,
        hidden: Tensor,
        plans: Sequence[NativePlan],
        rotations: Sequence[tuple[Tensor, Tensor] | None],
        caches: Sequence[Tensor],
        slots: Tensor,
    ) -> None:
        num_tokens = len(hidden)
        if hidden.shape[1] != self._hidden_size or hidden.dtype != torch.float32 or not hidden.is_contiguous():
            raise ValueError(
                f"layers: hidden is {hidden.dtype} {list(hidden.shape)}, contiguous float32 "
                f"[tokens, {self._hidden_size}] is needed"
            )
        if not len(plans) == len(rotations) == len(caches) == len(self._addresses):
            raise ValueError(
                f"layers: {len(plans)} plans, {len(rotations)} rotations and {len(caches)} caches for "
                f"{len(self._addresses)} layers"
            )
        block = min(num_tokens, MLP_ROWS)
        # What no layer needs of it stays untouched, hence takes no memory.
        scratch = torch.empty(num_tokens * 3 * self._hidden_size + max(num_tokens * self._heads, block * self._inner))
        self._call(
            len(self._addresses),
            self._addresses,
            launch.addresses(ctypes.addressof(plan.args) for plan in plans),
            launch.addresses(cache.data_ptr() for cache in caches),
            hidden.data_ptr(),
            num_tokens,
            launch.addresses(None if each is None else each[0].data_ptr() for each in rotations),
            launch.addresses(None if each is None else each[1].data_ptr() for each in rotations),
            NATIVE_TYPES.index(caches[0].dtype),
            slots.data_ptr(),
            scratch.data_ptr(),
        )


def fuse_layers(layers: Sequence[LayerParts]) -> NativeLayers:
    return NativeLayers(layers)


class _Weights:
    """One layer's structure, and what it points to."""

    def __init__(self, parts: LayerParts) -> None:
        qkv, output = _native(parts.qkv), _native(parts.output)
        self.hidden_size = qkv.in_features
        self.heads_size = qkv.out_features + output.in_features
        self.inner_size = 0
        self.layer = library.LayerWeights(
            qkv=qkv.address,
            output=output.address,
            qkv_bias=qkv.bias_address,
            output_bias=output.bias_address,
            sinks=None if parts.sinks is None else parts.sinks.data_ptr(),
            attention_norm=_norm(parts.attention_norm),
            query_norm=_norm(parts.query_norm),
            key_norm=_norm(parts.key_norm),
            attention_output_norm=_norm(parts.attention_output_norm),
            mlp_norm=_norm(parts.mlp_norm),
            mlp_output_norm=_norm(parts.mlp_output_norm),
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            scale=parts.scale,
            residual_scale=parts.residual_scale,
            parallel=parts.parallel,
        )
        if isinstance(parts.mlp, MLPParts):
            self._set_mlp(parts.mlp)
        else:
            self._set_experts(parts.mlp)

    def _set_mlp(self, mlp: MLPParts) -> None:
        up, down = _native(mlp.up), _native(mlp.down)
        self.inner_size = up.out_features + down.in_features
        layer = self.layer
        layer.up, layer.up_bias = up.address, up.bias_address
        layer.down, layer.down_bias = down.address, down.bias_address
        layer.activation = library.ACTIVATIONS.index(mlp.activation)
        layer.gated, layer.limit = mlp.gated, mlp.limit or 0.0

    def _set_experts(self, mlp: MoEParts) -> None:
        if not isinstance(mlp.experts, NativeExperts):
            raise TypeError(f"layers: {type(mlp.experts).__name__} is not packed by the native kernels")
        self._experts = mlp.experts.weights(_native(mlp.router), mlp.top_k, mlp.renormalized)
        self.layer.experts = ctypes.addressof(self._experts)


def _norm(parts: NormParts | None) -> library.NormWeights:
    if parts is None:
        return library.NormWeights()
    return library.NormWeights(
        weight=parts.weight.data_ptr(),
        bias=None if parts.bias is None else parts.bias.data_ptr(),
        size=len(parts.weight),
        eps=parts.eps,
        centered=parts.centered,
    )


def _native(linear: PackedLinear) -> NativeLinear:
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"layers: {type(linear).__name__} is not packed by the native kernels")
    return linear

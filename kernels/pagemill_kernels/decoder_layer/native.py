"""All layers in one C++ call instead of nine or more calls for each, bitwise equal to these; float32 arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.adapters.native import NativeAdapterRows
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.decoder_layer.parts import (
    InputMLPParts,
    KeySource,
    LatentParts,
    LayerParts,
    MLPParts,
    MoEParts,
    NormParts,
)
from pagemill_kernels.experts.native import gating_of
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.paged_attention.native import NativePlan
from pagemill_kernels.ranks.reduce import NativeReduce

MLP_ROWS = 128
"""Number of tokens that layer.cpp takes through the MLP at a time."""

_KEY_SOURCES: tuple[KeySource, ...] = ("own", "keys", "another")


class CacheAddresses(NamedTuple):
    """Addresses of the caches of all layers. It does not keep the caches alive."""

    addresses: ctypes.Array[ctypes.c_void_p]
    strides: Array
    """Bytes from one block to the next, int64 [layers]."""
    number: int
    """Number of the caches' type."""

    @classmethod
    def of(cls, caches: Sequence[Array]) -> CacheAddresses:
        """Return the addresses of at least one cache."""
        strides = np.array([cache.strides[0] for cache in caches], dtype=np.int64)
        return cls(launch.addresses(map(address, caches)), strides, kinds.native_number(caches[0]))


class NativeLayers:
    def __init__(self, layers: Sequence[LayerParts]) -> None:
        """Build the call from at least one layer."""
        made = [_Weights(parts) for parts in layers]
        self._kept = layers, made
        """Keeps the objects alive that the addresses below point to."""
        self._addresses = launch.addresses(ctypes.addressof(each.layer) for each in made)
        self._hidden_size, self._first_size = made[0].hidden_size, layers[0].inputs
        self._heads = max(each.heads_size for each in made)
        self._inner = max(each.inner_size for each in made)
        self._windows = [parts.window for parts in layers]
        self._first_linears = np.array([parts.first_linear for parts in layers], dtype=np.int64)
        self._rotations = [parts.rotation for parts in layers]
        self._call = launch.native().pagemill_decoder_layers

    def __call__(
        self,
        hidden: Array,
        plans: Mapping[int | None, NativePlan],
        rotations: Sequence[tuple[Array, Array]],
        caches: CacheAddresses,
        slots: Mapping[int | None, Array],
        adapters: NativeAdapterRows | None = None,
        reduce: NativeReduce | None = None,
        first_input: Array | None = None,
        query_factors: Array | None = None,
        layer_inputs: Array | None = None,
    ) -> None:
        """Add the layers' contributions to `hidden`, float32 [tokens, hidden], in place.

        `plans` and `slots`: by window. `rotations`: cos and sin, by the numbers in the layers' parts. `adapters`: of
        the tokens. `reduce`: adds what ranks have computed. `first_input`: what the attention of the first layer reads,
        normalised, float32 [tokens, inputs of its qkv]; None: `hidden`, which has as many values. `query_factors`:
        float32 [tokens], for layers with `query_growth`. `layer_inputs`: contiguous float32 [tokens, inputs], for
        layers with an `input_mlp`. Other arguments: as for `rope.native` and `paged_attention.native`.
        """
        num_tokens = len(hidden)
        if hidden.shape[1] != self._hidden_size or hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
            raise ValueError(
                f"layers: hidden is {hidden.dtype} {list(hidden.shape)}, contiguous float32 "
                f"[tokens, {self._hidden_size}] is needed"
            )
        shape = (num_tokens, self._first_size)
        if first_input is None and self._first_size == self._hidden_size:
            first = None
        elif first_input is not None and first_input.shape == shape and first_input.dtype == np.float32:
            first = address(first_input)
        else:
            raise ValueError(f"layers: the first attention needs an input of its own, float32 {list(shape)}")
        if len(caches.addresses) != len(self._addresses):
            raise ValueError(f"layers: {len(caches.addresses)} caches for {len(self._addresses)} layers")
        # Parts that no layer needs stay untouched and hence take no memory.
        scratch = arrays.empty(self._scratch_size(num_tokens))
        args = {window: ctypes.addressof(plan.args) for window, plan in plans.items()}
        places = {window: address(each) for window, each in slots.items()}
        turns = [(address(cos), address(sin)) for cos, sin in rotations]
        self._call(
            len(self._addresses),
            self._addresses,
            launch.addresses(args[window] for window in self._windows),
            caches.addresses,
            address(caches.strides),
            first,
            address(hidden),
            num_tokens,
            optional_address(query_factors),
            launch.addresses(None if index is None else turns[index][0] for index in self._rotations),
            launch.addresses(None if index is None else turns[index][1] for index in self._rotations),
            caches.number,
            launch.addresses(places[window] for window in self._windows),
            self._hooks(adapters, reduce, layer_inputs),
            address(scratch),
        )
        if reduce is not None:
            reduce.check()

    def _scratch_size(self, num_tokens: int) -> int:
        """Return what layer.cpp needs, in floats."""
        inner = max(num_tokens * self._heads, min(num_tokens, MLP_ROWS) * self._inner)
        return num_tokens * 3 * self._hidden_size + inner

    def _hooks(
        self, adapters: NativeAdapterRows | None, reduce: NativeReduce | None, layer_inputs: Array | None
    ) -> library.StepHooks | None:
        if adapters is None and reduce is None and layer_inputs is None:
            return None
        return library.StepHooks(
            adapters=None if adapters is None else adapters.address,
            first_linear=address(self._first_linears),
            reduce=None if reduce is None else reduce.function,
            context=None if reduce is None else reduce.context,
            layer_inputs=optional_address(layer_inputs),
            input_stride=0 if layer_inputs is None else launch.row_stride(layer_inputs),
        )


class _Weights:
    """One layer's C structure, and the objects it points to."""

    def __init__(self, parts: LayerParts) -> None:
        output = parts.output
        self.hidden_size = output.out_features
        self.inner_size = 0
        self.layer = library.LayerWeights(
            output=output.address,
            output_bias=output.bias_address,
            sinks=optional_address(parts.sinks),
            alibi_slopes=optional_address(parts.alibi_slopes),
            attention_norm=_norm(parts.attention_norm),
            query_norm=_norm(parts.query_norm),
            key_norm=_norm(parts.key_norm),
            value_norm=_norm(parts.value_norm),
            attention_output_norm=_norm(parts.attention_output_norm),
            attention_residual_norm=_norm(parts.attention_residual_norm),
            mlp_norm=_norm(parts.mlp_norm),
            mlp_output_norm=_norm(parts.mlp_output_norm),
            mlp_residual_norm=_norm(parts.mlp_residual_norm),
            sum_norm=_norm(parts.sum_norm),
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            scale=parts.scale,
            residual_scale=parts.residual_scale,
            factor=1.0 if parts.factor is None else float(parts.factor[0]),
            clip=parts.clip or 0.0,
            soft_cap=parts.soft_cap or 0.0,
            parallel=parts.parallel,
            norms_behind=parts.norms_behind_rotation,
            grows=parts.query_growth,
            key_source=_KEY_SOURCES.index(parts.key_source),
            ahead=parts.ahead,
        )
        if isinstance(parts.qkv, LatentParts):
            self._set_latents(parts.qkv, output)
        else:
            self._set_qkv(parts.qkv, parts)
        if isinstance(parts.mlp, MLPParts):
            self._set_mlp(parts.mlp)
        else:
            self._set_experts(parts.mlp)
        if parts.beside is not None:
            self._set_experts(parts.beside)
        if parts.input_mlp is not None:
            self._set_input_mlp(parts.input_mlp)

    def _set_qkv(self, qkv: NativeLinear, parts: LayerParts) -> None:
        self.layer.qkv, self.layer.qkv_bias, self.layer.first_mlp = qkv.address, qkv.bias_address, 2
        repeated = parts.num_kv_heads * parts.head_dim if parts.key_source == "keys" else 0
        self.heads_size = qkv.out_features + repeated + parts.output.in_features

    def _set_latents(self, latent: LatentParts, output: NativeLinear) -> None:
        down = latent.query_down
        self._keys = launch.addresses(each.address for each in latent.keys)
        self._values = launch.addresses(each.address for each in latent.values)
        self._latent = library.LatentWeights(
            query_down=None if down is None else down.address,
            query=latent.query.address,
            down=latent.down.address,
            query_down_bias=None if down is None else down.bias_address,
            query_bias=latent.query.bias_address,
            down_bias=latent.down.bias_address,
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
            query_norm=_norm(latent.query_norm),
            latent_norm=_norm(latent.latent_norm),
            latent_size=latent.values[0].in_features,
            shared_size=latent.shared_size,
            key_dim=latent.keys[0].in_features,
            value_dim=latent.values[0].out_features,
        )
        self.layer.latent, self.layer.first_mlp = ctypes.addressof(self._latent), 4 + (down is not None)
        compressed = 0 if down is None else down.out_features
        self.heads_size = latent.query.out_features + latent.down.out_features + compressed + output.in_features

    def _set_input_mlp(self, parts: InputMLPParts) -> None:
        up, down = parts.mlp.up, parts.mlp.down
        self.heads_size = max(self.heads_size, 2 * down.in_features)  # all tokens at a time
        self._input_mlp = library.InputMLP(
            up=up.address,
            down=down.address,
            up_bias=up.bias_address,
            down_bias=down.bias_address,
            output_norm=_norm(parts.output_norm),
            first_input=parts.first_input,
            activation=library.ACTIVATIONS.index(parts.mlp.activation),
        )
        self.layer.input_mlp = ctypes.addressof(self._input_mlp)

    def _set_mlp(self, mlp: MLPParts) -> None:
        up, down = mlp.up, mlp.down
        self.inner_size = up.out_features + down.in_features
        layer = self.layer
        layer.up, layer.up_bias = up.address, up.bias_address
        layer.down, layer.down_bias = down.address, down.bias_address
        layer.activation = library.ACTIVATIONS.index(mlp.activation)
        layer.gated, layer.limit = mlp.gated, mlp.limit or 0.0

    def _set_experts(self, mlp: MoEParts) -> None:
        self._gating = None if mlp.gating is None else gating_of(mlp.gating, mlp.choice_bias)
        self._experts = mlp.experts.weights(mlp.router, mlp.top_k, mlp.renormalized, self._gating)
        self._experts.scales = optional_address(mlp.scales)
        self._experts.norm, self._experts.router_norm = _norm(mlp.norm), _norm(mlp.router_norm)
        self.layer.experts_output_norm = _norm(mlp.output_norm)
        self.layer.experts = ctypes.addressof(self._experts)
        if mlp.shared is not None:
            self._set_shared(*mlp.shared)

    def _set_shared(self, mlp: MLPParts, gate: NativeLinear | None) -> None:
        up, down = mlp.up, mlp.down
        own = up.out_features + down.in_features + (0 if gate is None else self.hidden_size)
        self.inner_size = max(self.inner_size, own)
        self._shared = library.SharedExpert(
            up=up.address,
            down=down.address,
            gate=None if gate is None else gate.address,
            up_bias=up.bias_address,
            down_bias=down.bias_address,
            gate_bias=None if gate is None else gate.bias_address,
            activation=library.ACTIVATIONS.index(mlp.activation),
            gated=mlp.gated,
            limit=mlp.limit or 0.0,
        )
        self.layer.shared = ctypes.addressof(self._shared)


def _norm(parts: NormParts | None) -> library.NormWeights:
    if parts is None:
        return library.NormWeights()
    return library.NormWeights(
        weight=address(parts.weight),
        bias=optional_address(parts.bias),
        size=parts.weight.shape[-1],
        eps=parts.eps,
        centered=parts.centered,
        whole_size=parts.whole_size,
        adds=parts.adds,
        heads=len(parts.weight) if parts.weight.ndim > 1 else 0,
    )

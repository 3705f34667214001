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
from pagemill_kernels.cpu.state_structures import StateCache
from pagemill_kernels.decoder_layer.parts import (
    InputMLPParts,
    KeySource,
    LatentParts,
    LayerParts,
    MLPParts,
    MoEParts,
    NormParts,
    RecurrentParts,
)
from pagemill_kernels.experts.native import gating_of
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.paged_attention.native import NativePlan
from pagemill_kernels.ranks.reduce import NativeReduce
from pagemill_kernels.recurrent.native import NativeStates

MLP_ROWS = 128
"""Number of tokens that layer.cpp takes through the MLP at a time."""

_KEY_SOURCES: tuple[KeySource, ...] = ("own", "keys", "another")


StateKept = tuple[Array, Array, Array, Array]
"""States, windows, logs and inputs of a recurrent layer (`recurrent.reference`)."""


class CacheAddresses(NamedTuple):
    """Addresses of the caches of all layers. It does not keep the caches alive."""

    addresses: ctypes.Array[ctypes.c_void_p]
    strides: Array
    """Bytes from one block to the next, int64 [layers]."""
    number: int
    """Number of the caches' type."""
    states: Sequence[StateCache | None]
    state_addresses: ctypes.Array[ctypes.c_void_p]

    @classmethod
    def of(cls, caches: Sequence[Array | None], states: Sequence[StateKept | None] | None = None) -> CacheAddresses:
        """Return the addresses of each layer's cache of keys and values, and of what it keeps as a recurrent layer."""
        strides = np.array([0 if cache is None else cache.strides[0] for cache in caches], dtype=np.int64)
        kept = [None if each is None else _state_cache(*each) for each in states or [None] * len(caches)]
        first = next((cache for cache in caches if cache is not None), None)
        return cls(
            launch.addresses(map(optional_address, caches)),
            strides,
            0 if first is None else kinds.native_number(first),
            kept,
            launch.addresses(None if each is None else ctypes.addressof(each) for each in kept),
        )


class NativeLayers:
    def __init__(self, layers: Sequence[LayerParts]) -> None:
        """Build the call from at least one layer."""
        made = [_Weights(parts) for parts in layers]
        self._kept = layers, made
        """Keeps the objects alive that the addresses below point to."""
        self._addresses = launch.addresses(ctypes.addressof(each.layer) for each in made)
        self._hidden_size, self._first_size = layers[0].hidden_size, layers[0].inputs
        self._heads = max(each.heads_size for each in made)
        self._inner = max(each.inner_size for each in made)
        self._windows = [None if parts.qkv is None else (parts.window,) for parts in layers]
        """Of layers with attention, as tuples of one."""
        self._first_linears = np.array([parts.first_linear for parts in layers], dtype=np.int64)
        self._rotations = [parts.rotation for parts in layers]
        self._recurrent = [index for index, parts in enumerate(layers) if parts.recurrent is not None]
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
        states: NativeStates | None = None,
        layer_inputs: Array | None = None,
    ) -> None:
        """Add the layers' contributions to `hidden`, float32 [tokens, hidden], in place.

        `plans` and `slots`: by window. `rotations`: cos and sin, by the numbers in the layers' parts. `adapters`: of
        the tokens. `reduce`: adds what ranks have computed. `first_input`: what the attention of the first layer reads,
        normalised, float32 [tokens, what its first product reads]; None: `hidden`, as wide as that. `query_factors`:
        float32 [tokens], for layers with `query_growth`. `states`: the step's rows for recurrent layers.
        `layer_inputs`: contiguous float32 [tokens, inputs], for layers with an `input_mlp`. Other arguments: as for
        `rope.native` and `paged_attention.native`.
        """
        first, num_tokens = self._checked(hidden, first_input), len(hidden)
        if len(caches.addresses) != len(self._addresses):
            raise ValueError(f"layers: {len(caches.addresses)} caches for {len(self._addresses)} layers")
        if self._recurrent and (states is None or any(caches.states[index] is None for index in self._recurrent)):
            raise ValueError(f"layers: states and the step's rows are needed for the layers {self._recurrent}")
        # Parts that no layer needs stay untouched and hence take no memory.
        scratch = arrays.empty(self._scratch_size(num_tokens))
        args = {window: ctypes.addressof(plan.args) for window, plan in plans.items()}
        places = {window: address(each) for window, each in slots.items()}
        turns = [(address(cos), address(sin)) for cos, sin in rotations]
        self._call(
            len(self._addresses),
            self._addresses,
            launch.addresses(None if each is None else args[each[0]] for each in self._windows),
            caches.addresses,
            address(caches.strides),
            first,
            address(hidden),
            num_tokens,
            self._hidden_size,
            optional_address(query_factors),
            launch.addresses(None if index is None else turns[index][0] for index in self._rotations),
            launch.addresses(None if index is None else turns[index][1] for index in self._rotations),
            caches.number,
            launch.addresses(None if each is None else places[each[0]] for each in self._windows),
            caches.state_addresses,
            None if states is None else states.step_rows,
            self._hooks(adapters, reduce, layer_inputs),
            address(scratch),
            launch.num_threads(),
        )
        if reduce is not None:
            reduce.check()

    def _checked(self, hidden: Array, first_input: Array | None) -> int | None:
        """Return the address of the first attention's input. Raises `ValueError` for what the call cannot read."""
        if hidden.shape[1] != self._hidden_size or hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
            raise ValueError(
                f"layers: hidden is {hidden.dtype} {list(hidden.shape)}, contiguous float32 "
                f"[tokens, {self._hidden_size}] is needed"
            )
        shape = (len(hidden), self._first_size)
        if first_input is None and self._first_size == self._hidden_size:
            return None
        if first_input is not None and first_input.shape == shape and first_input.dtype == np.float32:
            return address(first_input)
        raise ValueError(f"layers: the first attention needs an input of its own, float32 {list(shape)}")

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
        self._hidden_size = parts.hidden_size
        self.heads_size = self.inner_size = 0
        self.layer = library.LayerWeights(
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
            mlp_scale=parts.mlp_scale,
            factor=1.0 if parts.factor is None else float(parts.factor[0]),
            clip=parts.clip or 0.0,
            soft_cap=parts.soft_cap or 0.0,
            parallel=parts.parallel,
            norms_behind=parts.norms_behind_rotation,
            grows=parts.query_growth,
            gated_heads=parts.gated,
            first_attention=parts.first_attention,
            first_mlp=parts.first_mlp,
            key_source=_KEY_SOURCES.index(parts.key_source),
            ahead=parts.ahead,
        )
        if parts.qkv is not None and parts.output is not None:
            self._set_attention(parts, parts.qkv, parts.output)
        if parts.recurrent is not None:
            self._set_recurrent(parts.recurrent)
        if isinstance(parts.mlp, MLPParts):
            self._set_mlp(parts.mlp)
        elif parts.mlp is not None:
            self._set_experts(parts.mlp)
        if parts.beside is not None:
            self._set_experts(parts.beside)
        if parts.input_mlp is not None:
            self._set_input_mlp(parts.input_mlp)

    def _set_attention(self, parts: LayerParts, qkv: NativeLinear | LatentParts, output: NativeLinear) -> None:
        layer = self.layer
        layer.output, layer.output_bias = output.address, output.bias_address
        if isinstance(qkv, LatentParts):
            return self._set_latents(qkv, output)
        layer.qkv, layer.qkv_bias = qkv.address, qkv.bias_address
        repeated = parts.num_kv_heads * parts.head_dim if parts.key_source == "keys" else 0
        self.heads_size = qkv.out_features + repeated + output.in_features
        if parts.head_gates is not None:
            layer.head_gates, layer.head_gates_bias = parts.head_gates.address, parts.head_gates.bias_address
        return None

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
        self.layer.latent = ctypes.addressof(self._latent)
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

    def _set_recurrent(self, parts: RecurrentParts) -> None:
        self._recurrent = _recurrent_weights(parts)
        products = sum(each.out_features for each in parts.matrices() if each is not parts.output)
        own = products + parts.taps.shape[1] + parts.num_values * parts.value_dim
        self.heads_size = max(self.heads_size, own)
        self.layer.recurrent = ctypes.addressof(self._recurrent)

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
        if mlp.around is not None:
            before, behind = mlp.around
            self._experts.before, self._experts.before_bias = before.address, before.bias_address
            self._experts.behind, self._experts.behind_bias = behind.address, behind.bias_address
        self.layer.experts_output_norm = _norm(mlp.output_norm)
        self.layer.experts = ctypes.addressof(self._experts)
        if mlp.shared is not None:
            self._set_shared(*mlp.shared)

    def _set_shared(self, mlp: MLPParts, gate: NativeLinear | None) -> None:
        up, down = mlp.up, mlp.down
        own = up.out_features + down.in_features + (0 if gate is None else self._hidden_size)
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


def _recurrent_weights(parts: RecurrentParts) -> library.RecurrentWeights:
    inputs, rates, output, at = parts.inputs, parts.rates, parts.output, parts.places
    norm_parts, first_head, whole_heads = parts.norm_of_ranks
    of_values = parts.num_values * parts.value_dim
    steps_down, steps_up = parts.steps or (None, None)
    gates_down, gates_up = parts.gates or (None, None)
    decays = parts.num_values * (1 if steps_up is None else parts.key_dim)
    return library.RecurrentWeights(
        inputs=inputs.address,
        rates=None if rates is None else rates.address,
        steps_down=None if steps_down is None else steps_down.address,
        steps_up=None if steps_up is None else steps_up.address,
        gates_down=None if gates_down is None else gates_down.address,
        gates_up=None if gates_up is None else gates_up.address,
        output=output.address,
        inputs_bias=inputs.bias_address,
        rates_bias=None if rates is None else rates.bias_address,
        steps_down_bias=None if steps_down is None else steps_down.bias_address,
        steps_up_bias=None if steps_up is None else steps_up.bias_address,
        gates_down_bias=None if gates_down is None else gates_down.bias_address,
        gates_up_bias=None if gates_up is None else gates_up.bias_address,
        output_bias=output.bias_address,
        scales=optional_address(parts.scales),
        taps=address(parts.taps),
        tap_bias=optional_address(parts.tap_bias),
        decays=optional_address(parts.decays),
        biases=optional_address(parts.biases),
        skips=optional_address(parts.skips),
        gate_norm=optional_address(parts.gate_norm),
        norm=_norm(parts.norm),
        output_norm=_norm(parts.output_norm),
        channels=parts.taps.shape[1],
        width=len(parts.taps),
        log_values=parts.num_keys * parts.key_dim + of_values + decays,
        num_keys=parts.num_keys,
        num_values=parts.num_values,
        key_dim=parts.key_dim,
        value_dim=parts.value_dim,
        norm_size=parts.norm_size,
        # One head's weights serve all heads; others are those of all heads.
        norm_stride=0 if parts.gate_norm is None or len(parts.gate_norm) == parts.norm_size else parts.norm_size,
        mixed_at=at.mixed,
        gates_at=at.gates,
        steps_at=at.steps,
        queries_at=at.queries,
        keys_at=at.keys,
        values_at=at.values,
        norm_parts=norm_parts,
        first_head=first_head,
        whole_heads=whole_heads,
        eps=parts.eps,
        least_step=parts.step_limits[0],
        most_step=parts.step_limits[1],
        rate_scale=parts.rate_scale,
        residual_scale=parts.residual_scale,
        gates_first=parts.gates_first,
    )


def _state_cache(states: Array, windows: Array, log: Array, inputs: Array) -> StateCache:
    return StateCache(
        states=address(states),
        windows=address(windows),
        log=address(log),
        inputs=address(inputs),
        state_stride=launch.row_stride(states),
        window_stride=launch.row_stride(windows),
        log_stride=launch.row_stride(log),
        input_stride=launch.row_stride(inputs),
    )

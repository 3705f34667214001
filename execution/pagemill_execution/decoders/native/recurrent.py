"""Builds the native parts of blocks that keep a state, with weights; `layers` has those of attention and MLPs."""

from __future__ import annotations

import numpy as np

from pagemill_execution.decoders.native.parts import Parts
from pagemill_execution.decoders.tensors import read_tensor
from pagemill_kernels.arrays import Array
from pagemill_kernels.decoder_layer.parts import RecurrentParts, StatePlaces
from pagemill_models.declaration.caches import (
    ChannelDeltaRuleSpec,
    DeltaRuleSpec,
    RecurrentSpec,
    ShortConvolutionSpec,
    StateSpaceSpec,
    kernels,
)
from pagemill_models.declaration.declaration import BranchSpec


def recurrent_parts(branch: BranchSpec, block: RecurrentSpec, parts: Parts) -> RecurrentParts:
    """Return the parts of a block that keeps a state."""
    if isinstance(block, DeltaRuleSpec):
        made = _delta_rule(block, parts)
    elif isinstance(block, StateSpaceSpec):
        made = _state_space(block, parts)
    elif isinstance(block, ChannelDeltaRuleSpec):
        made = _channel_delta_rule(block, parts)
    else:
        made = _short_convolution(block, parts)
    return made._replace(
        norm=parts.norm(branch.norm), output_norm=parts.norm(branch.output_norm), residual_scale=branch.scale
    )


def _taps(convolutions: dict[str, int], width: int, parts: Parts) -> Array:
    """Return the kernel of a convolution that is stored in parts [channels, 1, width], as [width, channels]."""
    shapes = kernels(convolutions, width).items()
    stored = [read_tensor(parts.source, name, shape, "float32")[:, 0] for name, shape in shapes]
    return np.ascontiguousarray(np.concatenate(stored).T)


def _vector(name: str, size: int, parts: Parts) -> Array:
    return read_tensor(parts.source, name, (size,), "float32")


def _decays(name: str, shape: tuple[int, ...], parts: Parts) -> Array:
    """Return the factors of steps."""
    stored = read_tensor(parts.source, name, shape, "float32").reshape(-1)
    return (-np.exp(stored.astype(np.float64))).astype(np.float32)


def _delta_rule(spec: DeltaRuleSpec, parts: Parts) -> RecurrentParts:
    heads, of_keys = spec.num_value_heads, spec.num_key_heads * spec.key_dim
    norm = parts.norm(spec.norm)
    assert norm is not None
    return RecurrentParts(
        inputs=parts.linear(spec.inputs),
        rates=parts.linear(spec.rates),
        output=parts.linear(spec.output),
        taps=_taps(spec.convolutions, spec.width, parts),
        places=StatePlaces(mixed=0, gates=spec.channels, queries=0, keys=of_keys, values=2 * of_keys),
        decays=_decays(f"{spec.name}.A_log", (heads,), parts),
        biases=_vector(f"{spec.name}.dt_bias", heads, parts),
        gate_norm=norm.weight,
        num_keys=spec.num_key_heads,
        num_values=heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        norm_size=spec.value_dim,
        eps=norm.eps,
        rate_scale=spec.rate_scale,
    )


def _channel_delta_rule(spec: ChannelDeltaRuleSpec, parts: Parts) -> RecurrentParts:
    heads, of_keys = spec.num_value_heads, spec.num_value_heads * spec.key_dim
    norm = parts.norm(spec.norm)
    assert norm is not None
    return RecurrentParts(
        inputs=parts.linear(spec.inputs),
        rates=parts.linear(spec.rates),
        steps=(parts.linear(spec.decay_down), parts.linear(spec.decay_up)),
        gates=(parts.linear(spec.gate_down), parts.linear(spec.gate_up)),
        output=parts.linear(spec.output),
        taps=_taps(spec.convolutions, spec.width, parts),
        places=StatePlaces(mixed=0, gates=0, queries=0, keys=of_keys, values=2 * of_keys),
        decays=_decays(f"{spec.decay_name}.A_log", (1, 1, heads, 1), parts),
        biases=_vector(f"{spec.decay_name}.dt_bias", of_keys, parts),
        gate_norm=norm.weight,
        num_keys=heads,
        num_values=heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        norm_size=spec.value_dim,
        eps=norm.eps,
    )


def _state_space(spec: StateSpaceSpec, parts: Parts) -> RecurrentParts:
    name, heads = spec.name, spec.num_value_heads
    of_values, of_groups = heads * spec.head_dim, spec.num_groups * spec.state_size
    norm = parts.norm(spec.norm)
    return RecurrentParts(
        inputs=parts.linear(spec.inputs),
        output=parts.linear(spec.output),
        taps=_taps({f"{name}.conv1d": spec.channels}, spec.width, parts),
        tap_bias=_vector(f"{name}.conv1d.bias", spec.channels, parts) if spec.bias else None,
        places=StatePlaces(
            mixed=of_values,
            gates=0,
            steps=of_values + spec.channels,
            queries=of_values + of_groups,
            keys=of_values,
            values=0,
        ),
        scales=None if spec.scales is None else np.repeat(np.array(spec.scales, np.float32), spec.input_sizes),
        decays=_decays(f"{name}.A_log", (heads,), parts),
        biases=_vector(f"{name}.dt_bias", heads, parts),
        skips=_vector(f"{name}.D", heads, parts),
        gate_norm=None if norm is None else norm.weight,
        num_keys=spec.num_groups,
        num_values=heads,
        key_dim=spec.state_size,
        value_dim=spec.head_dim,
        norm_size=of_values // spec.norm_parts,
        norm_of_ranks=(0, 0, 0) if spec.norm_heads is None else (spec.norm_parts, *spec.norm_heads),
        eps=0.0 if norm is None else norm.eps,
        step_limits=spec.step_limits,
        gates_first=spec.gates_first,
    )


def _short_convolution(spec: ShortConvolutionSpec, parts: Parts) -> RecurrentParts:
    return RecurrentParts(
        inputs=parts.linear(spec.inputs),
        output=parts.linear(spec.output),
        taps=_taps({spec.name: spec.channels}, spec.width, parts),
        tap_bias=_vector(f"{spec.name}.bias", spec.channels, parts) if spec.bias else None,
        places=StatePlaces(mixed=0, gates=spec.channels, steps=2 * spec.channels),
    )

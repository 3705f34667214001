"""Rotary tables for all positions, scaled as the checkpoint's header says (`pagemill_models.declaration.rope_scaling`).

They are float32 arrays for every executor; executors with a device convert them to tensors.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.tensors import TensorSource, read_tensor
from pagemill_kernels.arrays import Array
from pagemill_models.declaration.declaration import DecoderSpec, RopeSpec
from pagemill_models.declaration.matrices import QueryGrowth
from pagemill_models.declaration.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)

Table = tuple[Array, Array]
"""cos and sin, each [max_model_len, head_dim / 2]."""


class Rotations:
    """cos and sin of all positions, for each rotary embedding of a model, over whole heads.

    The dimensions that a partial rotary embedding leaves out are at the end of each half (`row_order`) and are not
    rotated.
    """

    def __init__(self, tables: list[Table]) -> None:
        self.tables = tables

    def at(self, positions: NDArray[np.int64]) -> list[Table]:
        """Return cos and sin of the positions, each [tokens, head_dim / 2]."""
        return [(cos[positions], sin[positions]) for cos, sin in self.tables]


def query_factors(growth: QueryGrowth, positions: NDArray[np.int64]) -> Array:
    """Return the factors on queries, float32 [tokens]."""
    factors = 1 + growth.beta * np.log(1 + np.floor(positions / growth.length))
    return np.asarray(factors, dtype=np.float32)


def decoder_tables(decoder: DecoderSpec, max_positions: int, source: TensorSource) -> list[Table]:
    """Return the tables of `decoder.rotations()`. `source`: contains stored divisors of frequencies."""
    return [_head_tables(rope, size, max_positions, source) for rope, size in decoder.rotations()]


def _head_tables(rope: RopeSpec, head_dim: int, max_positions: int, source: TensorSource) -> Table:
    divisors = None
    if rope.divisors is not None:
        divisors = read_tensor(source, rope.divisors, (rope.rotary_dim // 2,), "float32")
    cos, sin = rope_tables(rope.rotary_dim, max_positions, rope.theta, rope.scaling, divisors)
    still = (head_dim - rope.rotary_dim) // 2
    if not still:
        return cos, sin
    widths = ((0, 0), (0, still))
    return np.pad(cos, widths, constant_values=1.0), np.pad(sin, widths)


def rope_tables(
    head_dim: int,
    max_positions: int,
    theta: float,
    scaling: RopeScaling | None,
    freq_divisors: Array | None = None,
) -> Table:
    """Return cos and sin, each [max_positions, head_dim / 2]. `head_dim`: the rotated dimensions of a head.

    `freq_divisors` [head_dim / 2] divides the frequencies instead of `scaling` (some GGUF files contain it).
    """
    periods = _periods(head_dim, theta)
    frequencies, factor = 1 / periods, 1.0
    if freq_divisors is not None:
        frequencies = frequencies / freq_divisors
    elif scaling is not None:
        frequencies, factor = _scaled(periods, head_dim, theta, scaling, max_positions)
    angles = np.outer(np.arange(max_positions, dtype=np.float32), frequencies)
    return np.cos(angles) * factor, np.sin(angles) * factor


def _periods(head_dim: int, theta: float) -> Array:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # numpy rounds powers correctly, unlike torch: some frequencies of transformers differ in the last bit.
    periods: Array = np.power(np.float32(theta), exponents)
    return periods


def _scaled(
    periods: Array, head_dim: int, theta: float, scaling: RopeScaling, max_positions: int
) -> tuple[Array, float]:
    """Return the scaled frequencies and the factor on cos and sin.

    The order of operations is that of transformers: the last bit of a frequency matters at the end of a long context.
    """
    frequencies = 1 / periods
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor, 1.0
        case DynamicScaling():
            return 1 / _periods(head_dim, _dynamic_theta(head_dim, theta, scaling, max_positions)), 1.0
        case Llama3Scaling():
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling():
            return _yarn(periods, head_dim, theta, scaling), scaling.attention_factor
        case ProportionalScaling():
            turning = np.arange(head_dim // 2) < int(scaling.share * head_dim // 2)
            return np.where(turning, frequencies / np.float32(scaling.factor), np.float32(0)), 1.0
        case LongRopeScaling():
            is_long = max_positions > scaling.original_max_position_embeddings
            divisors = np.array(scaling.long_factor if is_long else scaling.short_factor, dtype=np.float32)
            return 1 / (divisors * periods), scaling.attention_factor


def _dynamic_theta(head_dim: int, theta: float, scaling: DynamicScaling, max_positions: int) -> float:
    """Return the base for contexts of up to `max_positions`."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    if max_positions <= original:
        return theta
    growth = factor * max_positions / original - (factor - 1)
    return float(theta * growth ** (head_dim / max(1, head_dim - 2)))


def _llama3(frequencies: Array, scaling: Llama3Scaling) -> Array:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Array = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return blended


def _yarn(periods: Array, head_dim: int, theta: float, scaling: YarnScaling) -> Array:
    """Interpolate dimensions that turn rarely over the original context, and keep those that turn often."""
    original = scaling.original_max_position_embeddings

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Negative if the original context is shorter than one turn of every dimension; transformers computes the same.
    width = high - low or 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0.0, 1.0)
    kept = 1 - ramp
    values: Array = 1 / (scaling.factor * periods) * (1 - kept) + 1 / periods * kept
    return values

"""Rotary tables for all positions, scaled as the checkpoint's header says (`pagemill_protocol.rope_scaling`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_engine.models.tensors import TensorSource
from pagemill_kernels.torch_arrays import from_torch
from pagemill_protocol.models.declaration import DecoderSpec, RopeSpec
from pagemill_protocol.rope_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling


class Rotations:
    """cos and sin of all positions, for each rotary embedding of a model, over whole heads.

    What a partial rotary embedding leaves out lies at the end of each half (`row_order`) and does not turn.
    """

    def __init__(self, tables: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """`tables`: cos and sin, each [max_model_len, head_dim / 2]."""
        self.tables = [(cos.to(device), sin.to(device)) for cos, sin in tables]

    def at(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """As `ForwardContext.rotations` has them."""
        return [(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for cos, sin in self.tables]


def decoder_tables(
    decoder: DecoderSpec, max_positions: int, dtype: torch.dtype, source: TensorSource
) -> list[tuple[Tensor, Tensor]]:
    """For each of `decoder.ropes()`. `source`: of stored divisors of frequencies."""
    turning_dim = next(decoder.attentions()).turning_dim
    return [_head_tables(rope, turning_dim, max_positions, dtype, source) for rope in decoder.ropes()]


def _head_tables(
    rope: RopeSpec, head_dim: int, max_positions: int, dtype: torch.dtype, source: TensorSource
) -> tuple[Tensor, Tensor]:
    divisors = None
    if rope.divisors is not None:
        divisors = torch.empty(rope.rotary_dim // 2)
        source.read_into(rope.divisors, from_torch(divisors))
    cos, sin = rope_tables(rope.rotary_dim, max_positions, rope.theta, rope.scaling, dtype, divisors)
    still = (head_dim - rope.rotary_dim) // 2
    return (F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still), value=0.0)) if still else (cos, sin)


def rope_tables(
    head_dim: int,
    max_positions: int,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    freq_divisors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_positions, head_dim / 2]; `head_dim`: of what is rotated of a head.

    `freq_divisors` [head_dim / 2] divides the frequencies instead of `scaling` (some GGUF files carry it).
    """
    periods = _periods(head_dim, theta)
    frequencies, factor = 1.0 / periods, 1.0
    if freq_divisors is not None:
        frequencies = frequencies / freq_divisors
    elif scaling is not None:
        frequencies, factor = _scaled(periods, head_dim, theta, scaling, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _periods(head_dim: int, theta: float) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return theta**exponents


def _scaled(
    periods: Tensor, head_dim: int, theta: float, scaling: RopeScaling, max_positions: int
) -> tuple[Tensor, float]:
    """Frequencies and the factor on cos and sin.

    Rounded in the order of transformers: a last bit of a frequency is much at the end of a long context.
    """
    frequencies = 1.0 / periods
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor, 1.0
        case Llama3Scaling():
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling():
            return _yarn(periods, head_dim, theta, scaling), scaling.attention_factor
        case LongRopeScaling():
            is_long = max_positions > scaling.original_max_position_embeddings
            divisors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
            return 1.0 / (divisors * periods), scaling.attention_factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(periods: Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Interpolate dimensions that turn rarely over the original context, keep those that turn often."""
    original = scaling.original_max_position_embeddings

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Below 0 where the original context is shorter than a turn of every dimension; transformers computes it so too.
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2) - low) / width).clamp(0.0, 1.0)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept

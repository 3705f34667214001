"""Rotary tables for all positions, with the scaling rules of Hugging Face checkpoints.

Linear (position interpolation, arXiv 2306.15595), llama3 (Llama 3.1's frequency bands) and YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_engine.models.errors import UnsupportedModelError
from pagemill_engine.models.tensors import TensorSource
from pagemill_protocol.models.declaration import DecoderSpec, RopeSpec


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
    head_dim = next(decoder.attentions()).head_dim
    return [_head_tables(rope, head_dim, max_positions, dtype, source) for rope in decoder.ropes()]


def _head_tables(
    rope: RopeSpec, head_dim: int, max_positions: int, dtype: torch.dtype, source: TensorSource
) -> tuple[Tensor, Tensor]:
    divisors = None
    if rope.divisors is not None:
        divisors = torch.empty(rope.rotary_dim // 2)
        source.read_into(rope.divisors, divisors)
    cos, sin = rope_tables(rope.rotary_dim, max_positions, rope.theta, rope.scaling, dtype, divisors)
    still = (head_dim - rope.rotary_dim) // 2
    return (F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still), value=0.0)) if still else (cos, sin)


def rope_tables(
    head_dim: int,
    max_positions: int,
    theta: float,
    scaling: dict[str, Any] | None,
    dtype: torch.dtype,
    freq_divisors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_positions, head_dim / 2]; `head_dim`: of what is rotated of a head.

    `freq_divisors` [head_dim / 2] divides the frequencies instead of `scaling` (some GGUF files carry it).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies, factor = 1.0 / theta**exponents, 1.0
    if freq_divisors is not None:
        frequencies = frequencies / freq_divisors
    elif scaling:
        frequencies, factor = _scaled(frequencies, head_dim, theta, scaling)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _scaled(frequencies: Tensor, head_dim: int, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Frequencies and the factor on cos and sin."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, head_dim, theta, scaling)
    raise UnsupportedModelError(f"The rope scaling `{kind}` is not supported; default, linear, llama3 and yarn are.")


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    turns = original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Interpolate dimensions that turn rarely over the original context, keep those that turn often."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32.0), dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    scaled = frequencies / factor * ramp + frequencies * (1 - ramp)
    return scaled, _yarn_factor(factor, scaling)


def _yarn_factor(factor: float, scaling: dict[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)

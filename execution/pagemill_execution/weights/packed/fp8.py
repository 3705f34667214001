"""8-bit floats (E4M3) with scales: one for the tensor, one per output, or one per square of 128 x 128.

It reads DeepSeek-V3's `weight_scale_inv` (which is the factor, in spite of its name) and other writers' `weight_scale`,
as floats or as powers of two.
Activations are not rounded: `input_scale` and `activation_scheme` are not used.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.packed.matrix import (
    FLOAT_TYPES,
    IN,
    OUT,
    Layout,
    PackedMatrix,
    Settings,
    Stored,
    StoredAxis,
    check_shape,
    check_type,
    two_sizes,
)
from pagemill_kernels.arrays import widened
from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes

E4M3 = "F8_E4M3"
_E8M0 = "F8_E8M0"
"""Scales that are powers of two, of which only the exponents are stored (OCP Microscaling Formats, 2023)."""
_SCALES = (".weight_scale_inv", ".weight_scale")
_UNUSED = (".input_scale", ".activation_scale")


def matrices(settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
    """Return the packed matrices by weight name. Raises `LoadError`."""
    block = settings.get("weight_block_size")
    bases = [name.removesuffix(".weight") for name in stored.names() if name.endswith(".weight")]
    return {
        f"{base}.weight": matrix(stored, base, tuple(block) if block else None)
        for base in bases
        if stored.dtype(f"{base}.weight") == E4M3
    }


def is_packed(settings: Settings, names: Collection[str], base: str) -> bool:
    return any(base + each in names for each in _SCALES)


def kind(settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
    block = settings.get("weight_block_size")
    return _kind(shape[1], tuple(block) if block else None)


def details(settings: Settings) -> list[str]:
    block = settings.get("weight_block_size")
    scheme = settings.get("activation_scheme")
    blocks = ["blocks of " + " x ".join(map(str, block))] if block else []
    return ["e4m3", *blocks, *([] if scheme is None else [f"activations {scheme}: not rounded here"])]


def matrix(stored: Stored, base: str, block: tuple[int, ...] | None) -> PackedMatrix:
    """Return a matrix.

    `block`: the outputs and inputs that share a scale; None: the scales' shape decides whether one is for all or for an
    output.
    """
    name = f"{base}.weight"
    out_features, in_features = two_sizes(stored, name)
    scale = next((base + each for each in _SCALES if stored.has(base + each)), base + _SCALES[1])
    allowed: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (out_features,), (out_features, 1))
    if block is not None:
        allowed = ((-(-out_features // block[0]), -(-in_features // block[1])),)
    check_shape(stored, scale, *allowed)
    check_type(stored, scale, *FLOAT_TYPES, _E8M0)

    group = _group_size(in_features, block)

    def scales() -> NDArray[np.float32]:
        """Return the scales, [out, in / group]."""
        factors = _factors(stored, scale)
        if block is None:
            return np.broadcast_to(factors.reshape(-1, 1), (out_features, 1))
        columns = factors.repeat(block[1] // group, 1)[:, : in_features // group]
        return columns.repeat(block[0], 0)[:out_features]

    def codes() -> GroupCodes:
        return GroupCodes(8, stored.read(name), scales(), None, is_float=True)

    layout: Layout = {name: (OUT, IN)}
    if block is not None:
        layout = {**layout, scale: (StoredAxis(0, block[0]), StoredAxis(1, 0 if in_features % block[1] else block[1]))}
    elif stored.shape(scale)[:1] == (out_features,):
        layout = {**layout, scale: (OUT,)}
    unused = tuple(base + each for each in _UNUSED if stored.has(base + each))
    found = _kind(in_features, block)
    return PackedMatrix(
        (out_features, in_features),
        (name, scale, *unused),
        lambda: codes().dequantize(),
        found,
        None if found is None else codes,
        layout,
    )


def _factors(stored: Stored, name: str) -> NDArray[np.float32]:
    values = stored.read(name)
    if stored.dtype(name) != _E8M0:
        return widened(values)
    return np.ldexp(np.float32(1.0), values.astype(np.int32) - 127)


def _group_size(in_features: int, block: tuple[int, ...] | None) -> int:
    """Return the largest group size that divides blocks and inputs, because the last block of inputs may be cut off."""
    return in_features if block is None else math.gcd(block[1], in_features)


def _kind(in_features: int, block: tuple[int, ...] | None) -> CodeKind | None:
    group = _group_size(in_features, block)
    return CodeKind(8, group, is_float=True) if group % GROUP_SIZE == 0 else None

"""Floats of 8 bits (E4M3) with scales: one for the tensor, one for each output, or one for each square of 128 x 128.

DeepSeek-V3's `weight_scale_inv` (the factor, whatever its name says) and the `weight_scale` of other writers.
Activations are not rounded: `input_scale` and `activation_scheme` are not used.
"""

from __future__ import annotations

from torch import Tensor

from pagemill_engine.loading.packed.matrix import PackedMatrix, Settings, Stored, check_shape

E4M3 = "F8_E4M3"
_SCALES = (".weight_scale_inv", ".weight_scale")
_UNUSED = (".input_scale", ".activation_scale")


def matrices(settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
    """By their names. Raises `LoadError`."""
    block = settings.get("weight_block_size")
    bases = [name.removesuffix(".weight") for name in stored.names() if name.endswith(".weight")]
    return {
        f"{base}.weight": matrix(stored, base, tuple(block) if block else None)
        for base in bases
        if stored.dtype(f"{base}.weight") == E4M3
    }


def matrix(stored: Stored, base: str, block: tuple[int, ...] | None) -> PackedMatrix:
    """`block`: outputs and inputs that share a scale; `None`: all, or those of an output, by the scales' shape."""
    name = f"{base}.weight"
    out_features, in_features = stored.shape(name)
    scale = next((base + each for each in _SCALES if stored.has(base + each)), base + _SCALES[1])
    allowed: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (out_features,), (out_features, 1))
    if block is not None:
        allowed = ((-(-out_features // block[0]), -(-in_features // block[1])),)
    check_shape(stored, scale, *allowed)

    def floats() -> Tensor:
        factors = stored.read(scale).float()
        if block is None:
            return stored.read(name).float() * factors.reshape(-1, 1)
        factors = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return stored.read(name).float() * factors[:out_features, :in_features]

    unused = tuple(base + each for each in _UNUSED if stored.has(base + each))
    return PackedMatrix((out_features, in_features), (name, scale, *unused), floats)

"""bitsandbytes: NF4 and FP4 of Dettmers et al., "QLoRA", 2023, and the 8-bit integers of "LLM.int8()", 2022.

4 bits select one of 16 floats (`quant_map`), which is multiplied by the largest magnitude of a run of `blocksize`
values; that magnitude may be quantized itself. Where runs cross the ends of rows, their parts are separate groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.packed.matrix import (
    FLOAT_TYPES,
    IN,
    OUT,
    PackedMatrix,
    Settings,
    Stored,
    bases,
    check_shape,
    check_type,
    code_kind,
    coded,
    group_codes,
    two_sizes,
    unsupported,
)
from pagemill_kernels.arrays import widened
from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes

_STATE = ".quant_state.bitsandbytes__"
_TABLES = ("nf4", "fp4")
_STORAGE = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Types whose bytes may hold the indices (`bnb_4bit_quant_storage`), with their sizes."""
_MAX_8_BITS = 127
_MAX_BLOCK_SIZE = 4096
"""bitsandbytes' largest. Each stored magnitude is repeated that many times."""
_NESTED_VALUES = 256
_BLOCK_SIZE = 64
"""transformers' block size. Settings do not contain it; a matrix's own state does."""


def matrices(settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
    """Return the packed matrices by weight name. Raises `LoadError`."""
    found = {}
    for table in _TABLES:
        for name in bases(stored, f"{_STATE}{table}"):
            found[name] = _table(stored, name, f"{name}{_STATE}{table}")
    for base in bases(stored, ".SCB"):
        found[f"{base}.weight"] = _integers(stored, base)
    return found


def is_packed(settings: Settings, names: Collection[str], base: str) -> bool:
    return f"{base}.SCB" in names or any(f"{base}.weight{_STATE}{table}" in names for table in _TABLES)


def kind(settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
    return code_kind(8, shape[1], 1, offsets=False) if f"{base}.SCB" in names else _table_kind(shape[1], _BLOCK_SIZE)


def details(settings: Settings) -> list[str]:
    if settings.get("load_in_8bit"):
        return ["8 bits: activations not rounded here"]
    double = ["double quantization"] if settings.get("bnb_4bit_use_double_quant") else []
    return [str(settings.get("bnb_4bit_quant_type", "fp4")), *double]


def _integers(stored: Stored, base: str) -> PackedMatrix:
    name, scales_name, form = f"{base}.weight", f"{base}.SCB", f"{base}.weight_format"
    out_features, in_features = two_sizes(stored, name)
    check_shape(stored, scales_name, (out_features,))
    check_type(stored, name, "I8")
    check_type(stored, scales_name, *FLOAT_TYPES)
    parts = (name, scales_name, *([form] if stored.has(form) else []))

    def scales() -> NDArray[np.float32]:
        return widened(stored.read(scales_name))[:, None] / np.float32(_MAX_8_BITS)

    def codes() -> GroupCodes:
        return group_codes(8, stored.read(name), scales(), None)

    layout = {name: (OUT, IN), scales_name: (OUT,)}
    kind = code_kind(8, in_features, 1, offsets=False)
    if kind is not None:
        return coded((out_features, in_features), parts, kind, codes, layout)
    return PackedMatrix(
        (out_features, in_features), parts, lambda: stored.read(name).astype(np.float32) * scales(), layout=layout
    )


class _State(NamedTuple):
    """What a tensor of JSON says of a matrix."""

    out_features: int
    in_features: int
    block_size: int
    is_nested: bool
    """Whether the largest magnitudes are quantized themselves."""
    nested_size: int
    offset: float


def _state(stored: Stored, state_name: str) -> _State:
    try:
        state: dict[str, Any] = orjson.loads(stored.read(state_name).tobytes())
        out_features, in_features = (int(size) for size in state["shape"])
        block_size, nested_size = int(state["blocksize"]), int(state.get("nested_blocksize", 1))
        if min(out_features, in_features, block_size, nested_size) < 1:
            raise ValueError("a size below 1")
        if max(block_size, nested_size) > _MAX_BLOCK_SIZE:
            raise ValueError(f"a block size above {_MAX_BLOCK_SIZE}")
        is_nested = "nested_blocksize" in state
        offset = float(state["nested_offset"]) if is_nested else 0.0
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise unsupported(
            stored, f"a quantization state `{state_name}` that is not readable ({str(error)[:120]})"
        ) from error
    return _State(out_features, in_features, block_size, is_nested, nested_size, offset)


def _table(stored: Stored, name: str, state_name: str) -> PackedMatrix:
    out_features, in_features, block_size, is_nested, nested_size, offset = _state(stored, state_name)
    num_values = out_features * in_features
    num_blocks = -(-num_values // block_size)
    check_type(stored, name, *_STORAGE)
    item_bytes = _STORAGE[stored.dtype(name)] if stored.has(name) else 1
    check_shape(stored, name, (math.ceil(num_values / 2 / item_bytes), 1))
    check_shape(stored, f"{name}.quant_map", (16,))
    check_shape(stored, f"{name}.absmax", (num_blocks,))
    check_type(stored, f"{name}.quant_map", *FLOAT_TYPES)
    check_type(stored, f"{name}.absmax", *(["U8"] if is_nested else FLOAT_TYPES))
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"] if is_nested else []
    for each, size in zip(nested, (-(-num_blocks // nested_size), _NESTED_VALUES), strict=False):
        check_shape(stored, each, (size,))
        check_type(stored, each, *FLOAT_TYPES)

    def largest() -> NDArray[np.float32]:
        stored_largest = stored.read(f"{name}.absmax")
        if not nested:
            return widened(stored_largest)
        absmax, table = (widened(stored.read(each)) for each in nested)
        return table[stored_largest] * absmax.repeat(nested_size)[:num_blocks] + offset

    group_size = math.gcd(block_size, in_features)

    def codes() -> GroupCodes:
        packed = stored.read(name).reshape(-1).view(np.uint8)
        indices = np.stack((packed >> 4, packed & 15), 1).reshape(-1)[:num_values]
        scales = largest().repeat(block_size // group_size)[: num_values // group_size]
        return GroupCodes(
            4,
            indices.reshape(out_features, in_features),
            scales.reshape(out_features, -1),
            None,
            table=widened(stored.read(f"{name}.quant_map")),
        )

    parts = (name, state_name, f"{name}.quant_map", f"{name}.absmax", *nested)
    found = _table_kind(in_features, block_size)
    return PackedMatrix(
        (out_features, in_features),
        parts,
        lambda: codes().dequantize(),
        found,
        None if found is None else codes,
    )


def _table_kind(in_features: int, block_size: int) -> CodeKind | None:
    group_size = math.gcd(block_size, in_features)
    return CodeKind(4, group_size, is_float=True) if group_size % GROUP_SIZE == 0 else None

"""compressed-tensors, as LLM Compressor writes it: `pack-quantized`, `int-quantized`, `float-quantized` and
`nvfp4-pack-quantized` matrices.

`weight_packed` int32 [out, in * bits / 32] contains consecutive inputs in a word, each raised by half its range so that
it is positive; zeros are packed the same way along the outputs. 8-bit integers may be unpacked; 8-bit floats are stored
as in `fp8`, 4-bit floats as uint8 [out, in / 2]. Activations are not rounded, whatever `input_activations` says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CODE_KINDS, CodeKind
from pagemill_execution.weights.dequantize import mxfp4_codes
from pagemill_execution.weights.packed import fp8
from pagemill_execution.weights.packed.matrix import (
    FLOAT_TYPES,
    IN,
    OUT,
    WORD_BITS,
    WORD_TYPES,
    Layout,
    PackedMatrix,
    Settings,
    Stored,
    StoredAxis,
    bases,
    check_shape,
    check_type,
    code_kind,
    coded,
    group_axis,
    group_codes,
    groups_of,
    num_groups,
    spread,
    two_sizes,
    unpacked,
    unsupported,
)
from pagemill_kernels.arrays import widened
from pagemill_kernels.linear.groups import GroupCodes, e4m3_values

PACKED = ".weight_packed"
_READ = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_FP4 = CODE_KINDS["NVFP4"]


def matrices(settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
    """Return the packed matrices by weight name. Raises `LoadError`."""
    groups: list[dict[str, Any]] = list((settings.get("config_groups") or {}).values())
    for form in (settings.get("format"), *(group.get("format") for group in groups)):
        if form is not None and form not in _READ:
            raise unsupported(stored, f"`format` {form!r}")
    block = next((each["block_structure"] for each in _weights(settings) if each.get("block_structure")), None)
    found = {
        f"{base}.weight": (_small_floats if stored.dtype(f"{base}{PACKED}") == "U8" else _packed)(stored, base)
        for base in bases(stored, PACKED)
    }
    for base in bases(stored, ".weight"):
        dtype = stored.dtype(f"{base}.weight")
        if dtype == "I8":
            found[f"{base}.weight"] = _integers(stored, base)
        elif dtype == fp8.E4M3:
            found[f"{base}.weight"] = fp8.matrix(stored, base, None if block is None else tuple(block))
    return found


def is_packed(settings: Settings, names: Collection[str], base: str) -> bool:
    return f"{base}{PACKED}" in names or f"{base}.weight_scale" in names


def kind(settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
    """Return the form of a matrix in memory.

    The width of a folder's first group is used for all groups.
    """
    weights: dict[str, Any] = next((each for each in _weights(settings) if each.get("num_bits")), {})
    is_packed = f"{base}{PACKED}" in names
    if is_packed and weights.get("type") == "float":
        return _FP4
    if not is_packed and "float" in (weights.get("type"), str(settings.get("format")).partition("-")[0]):
        return fp8.kind({"weight_block_size": weights.get("block_structure")}, names, base, shape)
    bits = int(weights.get("num_bits") or (4 if is_packed else 8))
    has_zeros = f"{base}.weight_zero_point" in names
    return code_kind(bits, shape[1], num_groups(weights, shape[1]), offsets=has_zeros)


def _weights(settings: Settings) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = list((settings.get("config_groups") or {}).values())
    return [group.get("weights") or {} for group in groups]


def details(settings: Settings) -> list[str]:
    found = []
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        size = weights.get("group_size") or 0
        per = f"groups of {size}" if size > 0 else str(weights.get("strategy") or "")
        order = "act-order" if weights.get("actorder") == "group" else ""
        inputs = group.get("input_activations")
        rounded = "" if inputs is None else f"activations of {inputs.get('num_bits')} bits: not rounded here"
        found += [f"{weights.get('num_bits')}-bit {weights.get('type', 'int')} weights", per, order, rounded]
    return [each for each in dict.fromkeys(found) if each]


def _packed(stored: Stored, base: str) -> PackedMatrix:
    """Return a packed matrix. Its width follows from its shapes, because groups of a folder may differ."""
    name, shape_name = f"{base}{PACKED}", f"{base}.weight_shape"
    check_shape(stored, shape_name, (2,))
    check_type(stored, shape_name, "I64", "I32")
    check_type(stored, name, *WORD_TYPES)
    out_features, in_features = (int(size) for size in stored.read(shape_name))
    _, words = two_sizes(stored, name)
    bits = next((each for each in (4, 8) if -(-in_features * each // WORD_BITS) == words), None)
    if bits is None:
        raise unsupported(stored, f"integers of other than 4 or 8 bits in `{name}`")
    check_shape(stored, name, (out_features, words))

    def integers() -> NDArray[np.uint8]:
        return unpacked(stored.read(name), bits)[:, :in_features]

    layout = {name: (OUT, StoredAxis(1, WORD_BITS // bits))}
    found = _grouped(stored, base, (out_features, in_features), bits, (name, shape_name), integers, layout)
    return replace(found, shape_part=shape_name)


def _small_floats(stored: Stored, base: str) -> PackedMatrix:
    """Return a matrix in NVFP4: 4-bit floats (e2m1) of neighbouring inputs in a byte, the first one in the lower half.

    16 inputs share a scale, an 8-bit float (e4m3), which is divided by that of the matrix.
    """
    name, scale, divisor = f"{base}{PACKED}", f"{base}.weight_scale", f"{base}.weight_global_scale"
    out_features, in_features = two_sizes(stored, name)[0], 2 * two_sizes(stored, name)[1]
    if in_features % _FP4.group_size:
        raise unsupported(stored, f"4-bit floats in `{name}` of {in_features} inputs, no multiple of 16")
    check_shape(stored, scale, (out_features, in_features // _FP4.group_size))
    check_type(stored, scale, fp8.E4M3)
    check_shape(stored, divisor, (1,), ())
    check_type(stored, divisor, *FLOAT_TYPES)

    def codes() -> GroupCodes:
        packed = stored.read(name)
        pairs = np.stack((packed & 15, packed >> 4), axis=-1).reshape(out_features, in_features)
        # The integers are doubled floats.
        scales = e4m3_values()[stored.read(scale)] * np.float32(0.5) / widened(stored.read(divisor)).reshape(())
        return GroupCodes(8, mxfp4_codes(pairs), scales, None)

    given = f"{base}.input_global_scale"
    parts = (name, scale, divisor, *((given,) if stored.has(given) else ()))
    layout = {name: (OUT, StoredAxis(1, 2)), scale: (OUT, StoredAxis(1, _FP4.group_size))}
    return coded((out_features, in_features), parts, _FP4, codes, layout)


def _integers(stored: Stored, base: str) -> PackedMatrix:
    name = f"{base}.weight"
    out_features, in_features = two_sizes(stored, name)

    def integers() -> NDArray[np.uint8]:
        return stored.read(name).view(np.uint8) ^ np.uint8(128)

    return _grouped(stored, base, (out_features, in_features), 8, (name,), integers, {name: (OUT, IN)})


def _grouped(
    stored: Stored, base: str, shape: tuple[int, int], bits: int, parts: tuple[str, ...], integers: Any, layout: Layout
) -> PackedMatrix:
    """Return a matrix of integers in groups.

    `integers`: returns uint8 [out, in], raised by half the range of `bits`. `layout`: of the integers.
    """
    out_features, in_features = shape
    scale, zero, index = f"{base}.weight_scale", f"{base}.weight_zero_point", f"{base}.weight_g_idx"
    num_groups = stored.shape(scale)[-1] if stored.has(scale) and len(stored.shape(scale)) == 2 else 1
    plain = ((), (1,), (out_features,), (out_features, num_groups))
    check_shape(stored, scale, *plain)
    check_type(stored, scale, *FLOAT_TYPES)
    if stored.has(zero):
        packed = (-(-out_features * bits // WORD_BITS), num_groups)
        check_type(stored, zero, "I32", "I8")
        check_shape(stored, zero, *([packed] if stored.dtype(zero) == "I32" else plain))
    groups = groups_of(stored, index, in_features, num_groups)
    others = [f"{base}.input_scale", f"{base}.input_zero_point", f"{base}.input_global_scale"]
    parts = (*parts, *(each for each in (scale, zero, index, *others) if stored.has(each)))

    def scales() -> NDArray[np.float32]:
        return np.broadcast_to(widened(stored.read(scale)).reshape(-1, num_groups), (out_features, num_groups))

    def zeros() -> NDArray[np.int16]:
        half = np.full((out_features, num_groups), 2 ** (bits - 1), dtype=np.int16)
        if not stored.has(zero):
            return half
        values = stored.read(zero)
        if values.dtype == np.int32:
            return unpacked(values.T, bits).T[:out_features].astype(np.int16)
        return half + values.reshape(-1, num_groups)

    def codes() -> GroupCodes:
        if bits == 8 and not stored.has(zero):
            return group_codes(8, (integers() ^ np.uint8(128)).view(np.int8), scales(), None, groups.order)
        return group_codes(cast(Literal[4, 8], bits), integers(), scales(), zeros(), groups.order)

    along = group_axis(in_features, num_groups)
    for each in (scale, zero):
        if stored.has(each) and stored.shape(each)[:1] not in ((), (1,)):
            outputs = StoredAxis(0, WORD_BITS // bits) if stored.dtype(each) == "I32" else OUT
            layout = {**layout, each: (outputs, along)}
    if stored.has(index):
        layout = {**layout, index: (StoredAxis(1, 0),)}
    kind = code_kind(bits, in_features, num_groups, offsets=stored.has(zero))
    if kind is not None and groups.are_runs:
        return coded(shape, parts, kind, codes, layout)
    return PackedMatrix(shape, parts, lambda: spread(integers(), scales(), zeros(), groups.of_input), layout=layout)

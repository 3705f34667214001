"""GPTQ as AutoGPTQ, GPTQModel and their successors write it: Frantar et al., "GPTQ", 2022.

`qweight` int32 [in * bits / 32, out] contains consecutive inputs in a word; `qzeros` int32 [groups, out * bits / 32];
`scales` [groups, out]; `g_idx` int32 [in], the group of each input. With `desc_act` (act-order) groups are not runs of
inputs: columns are sorted by group, and a matmul takes its inputs in that order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CodeKind
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
    group_size_in_words,
    groups_of,
    integer_setting,
    num_groups,
    spread,
    two_sizes,
    unpacked,
    unsupported,
)
from pagemill_kernels.arrays import Array
from pagemill_kernels.linear.groups import GroupCodes


def matrices(settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
    """Return the packed matrices by weight name. Raises `LoadError`.

    GPTQModel's `dynamic` gives some modules other bits and groups: the shapes of each matrix say which.
    """
    bits = integer_setting(stored, settings, "bits", allowed=(4, 8))
    rules = _rules(settings)
    has_order = any(each.get("desc_act") for each in (settings, *rules))
    lessened = settings.get("checkpoint_format", "gptq") != "gptq_v2"
    return {
        f"{base}.weight": _matrix(
            stored, base, _own_bits(stored, base) if rules else bits, has_order=has_order, lessened=lessened
        )
        for base in bases(stored, ".qweight")
    }


def _rules(settings: Settings) -> list[dict[str, Any]]:
    """Return the settings of `dynamic` in which some modules differ from the others."""
    dynamic = settings.get("dynamic")
    return [each for each in dynamic.values() if isinstance(each, dict)] if isinstance(dynamic, dict) else []


def _own_bits(stored: Stored, base: str) -> int:
    zeros, bits = f"{base}.qzeros", 4
    if stored.has(zeros):
        bits = WORD_BITS * two_sizes(stored, zeros)[1] // two_sizes(stored, f"{base}.qweight")[1]
    if bits not in (4, 8):
        raise unsupported(stored, f"{bits} bits for `{base}` by its `dynamic` (4 or 8 are read)")
    return bits


def is_packed(settings: Settings, names: Collection[str], base: str) -> bool:
    return f"{base}.qweight" in names


def kind(settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
    """Return the form of a matrix in memory; the widest, if some modules have other bits."""
    bits = [each["bits"] for each in (settings, *_rules(settings)) if type(each.get("bits")) is int]
    return code_kind(max(bits, default=4), shape[1], num_groups(settings, shape[1]), offsets=True)


def details(settings: Settings) -> list[str]:
    order = ["act-order"] if settings.get("desc_act") else []
    others = ["others by `dynamic`"] if _rules(settings) else []
    return [f"{settings.get('bits')} bits", *others, *group_size_in_words(settings), *order]


def _matrix(stored: Stored, base: str, bits: int, *, has_order: bool, lessened: bool) -> PackedMatrix:
    """Return a matrix. `lessened`: whether zeros are stored minus one, as by all writers before `gptq_v2`."""
    parts = (f"{base}.qweight", f"{base}.qzeros", f"{base}.scales")
    pack = WORD_BITS // bits
    words, out_features = two_sizes(stored, parts[0])
    in_features = words * pack
    num_groups = two_sizes(stored, parts[2])[0] if stored.has(parts[2]) else 1
    check_shape(stored, parts[1], (num_groups, out_features // pack))
    check_shape(stored, parts[2], (num_groups, out_features))
    for part, types in zip(parts, (WORD_TYPES, WORD_TYPES, FLOAT_TYPES), strict=True):
        check_type(stored, part, *types)
    index = f"{base}.g_idx"
    if stored.has(index):
        check_shape(stored, index, (in_features,))
        check_type(stored, index, "I32", "I64")
    groups = groups_of(stored, index if has_order else None, in_features, num_groups)

    def integers() -> tuple[NDArray[np.uint8], Array, NDArray[np.uint8]]:
        values, zeros, scales = (stored.read(part) for part in parts)
        zeros = unpacked(zeros, bits)
        if lessened:
            zeros = (zeros + 1) & (2**bits - 1)
        return unpacked(values.T, bits), scales.T, zeros.T

    def codes() -> GroupCodes:
        return group_codes(cast(Literal[4, 8], bits), *integers(), groups.order)

    all_parts = (*parts, index) if stored.has(index) else parts
    along = group_axis(in_features, num_groups)
    layout: Layout = {
        parts[0]: (StoredAxis(1, pack), OUT),
        parts[1]: (along, StoredAxis(0, pack)),
        parts[2]: (along, OUT),
    }
    if stored.has(index):  # the groups of some inputs have other numbers
        layout = {**layout, index: (StoredAxis(1, 0) if has_order else IN,)}
    kind = code_kind(bits, in_features, num_groups, offsets=True)
    if kind is not None and groups.are_runs:
        return coded((out_features, in_features), all_parts, kind, codes, layout)
    return PackedMatrix(
        (out_features, in_features), all_parts, lambda: spread(*integers(), groups.of_input), layout=layout
    )

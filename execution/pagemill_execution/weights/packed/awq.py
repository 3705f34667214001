"""AWQ as AutoAWQ writes it (`version: gemm`): Lin et al., "AWQ: Activation-aware Weight Quantization", 2023.

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8] contain eight outputs per word, `scales` [groups,
out].
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.packed.matrix import (
    FLOAT_TYPES,
    IN,
    OUT,
    WORD_TYPES,
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

_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Output index, among the eight that share a word, of the word's n-th integer."""


def matrices(settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
    """Return the packed matrices by weight name. Raises `LoadError`."""
    integer_setting(stored, settings, "bits", "w_bit", allowed=(4,))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise unsupported(stored, f"`version` {version!r}")
    return {f"{base}.weight": _matrix(stored, base) for base in bases(stored, ".qweight")}


def is_packed(settings: Settings, names: Collection[str], base: str) -> bool:
    return f"{base}.qweight" in names


def kind(settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
    return code_kind(4, shape[1], num_groups(settings, shape[1]), offsets=True)


def details(settings: Settings) -> list[str]:
    return ["4 bits", *group_size_in_words(settings)]


def _matrix(stored: Stored, base: str) -> PackedMatrix:
    parts = (f"{base}.qweight", f"{base}.qzeros", f"{base}.scales")
    in_features, words = two_sizes(stored, parts[0])
    num_groups = two_sizes(stored, parts[2])[0] if stored.has(parts[2]) else 1
    out_features = words * 8
    check_shape(stored, parts[1], (num_groups, words))
    check_shape(stored, parts[2], (num_groups, out_features))
    for part, types in zip(parts, (WORD_TYPES, WORD_TYPES, FLOAT_TYPES), strict=True):
        check_type(stored, part, *types)

    def integers() -> tuple[NDArray[np.uint8], Array, NDArray[np.uint8]]:
        values, zeros, scales = (stored.read(part) for part in parts)
        return _outputs(values), scales.T, _outputs(zeros)

    def codes() -> GroupCodes:
        return group_codes(4, *integers())

    shape, groups, packed = (out_features, in_features), group_axis(in_features, num_groups), StoredAxis(0, 8)
    layout = {parts[0]: (IN, packed), parts[1]: (groups, packed), parts[2]: (groups, OUT)}
    kind = code_kind(4, in_features, num_groups, offsets=True)
    if kind is not None:
        return coded(shape, parts, kind, codes, layout)
    of_input = groups_of(stored, None, in_features, num_groups).of_input
    return PackedMatrix(shape, parts, lambda: spread(*integers(), of_input), layout=layout)


def _outputs(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Unpack int32 [n, out / 8] to uint8 [out, n]."""
    packed = unpacked(words, 4).reshape(len(words), -1, 8)
    values = np.empty_like(packed)
    values[..., _ORDER] = packed
    return np.ascontiguousarray(values.reshape(len(words), -1).T)

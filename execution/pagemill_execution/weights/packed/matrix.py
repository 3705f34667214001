"""A packed matrix: its shape, its form in memory, and the stored tensors that contain it.

Also the helpers of all formats: unpacking integers from 32-bit words, and building `GroupCodes` from integers, scales
and zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.arrays import Array, widened
from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes
from pagemill_models.sharding.slices import Slices, TensorSlice

WORD_BITS = 32
REMEDY = "Fetch the folder again and compare its files with the publisher's."


class Stored(Protocol):
    """The tensors of a folder as they are stored."""

    @property
    def where(self) -> str:
        """The folder's name in messages."""
        ...

    def names(self) -> Iterable[str]: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Return the type as safetensors names it, for example `F8_E4M3`."""
        ...

    def read(self, name: str) -> Array: ...


Settings = dict[str, Any]
"""`quantization_config` of `config.json`."""


class StoredAxis(NamedTuple):
    """What a dimension of a stored tensor counts."""

    dimension: Literal[0, 1]
    """Of the matrix: its outputs or its inputs."""
    size: int = 1
    """How many of these share an entry; 0: they cannot be taken apart."""


OUT, IN = StoredAxis(0), StoredAxis(1)
Layout = Mapping[str, tuple[StoredAxis | None, ...]]
"""The dimensions of stored tensors; None for one that counts neither outputs nor inputs. Tensors that are left out
belong to the whole matrix."""


@dataclass(frozen=True)
class PackedMatrix:
    shape: tuple[int, int]
    """[out, in]"""
    parts: tuple[str, ...]
    """Names of the stored tensors."""
    floats: Callable[[], NDArray[np.float32]]
    """Returns the values, [out, in]."""
    kind: CodeKind | None = None
    codes: Callable[[], GroupCodes] | None = None
    """Returns the quantized values; set if `kind` is. Dequantized they equal `floats`."""
    layout: Layout = field(default_factory=dict)
    """Where outputs and inputs are stored. Empty: parts of the matrix cannot be read."""
    shape_part: str | None = None
    """The stored tensor that contains the shape."""

    def parts_of(self, found: TensorSlice) -> Slices | None:
        """Return what some outputs or inputs need of the stored tensors, of which others are read whole; None if they
        share entries with others."""
        if not self.layout or found.dimension == 2:
            return None
        end = self.shape[found.dimension]
        parts: Slices = {}
        for name, axes in self.layout.items():
            for number, axis in enumerate(axes):
                if axis is None or axis.dimension != found.dimension:
                    continue
                if not axis.size or any(edge % axis.size and edge != end for each in found.ranges for edge in each):
                    return None
                ranges = tuple((first // axis.size, -(-last // axis.size)) for first, last in found.ranges)
                parts[name] = TensorSlice(cast(Literal[0, 1], number), ranges)
        return parts

    def without_small_floats(self) -> PackedMatrix:
        """Return the matrix as floats if it is quantized to floats, for kernels that multiply integers only."""
        return replace(self, kind=None, codes=None) if self.kind is not None and self.kind.is_float else self


def coded(
    shape: tuple[int, int], parts: tuple[str, ...], kind: CodeKind, codes: Callable[[], GroupCodes], layout: Layout
) -> PackedMatrix:
    return PackedMatrix(shape, parts, lambda: codes().dequantize(), kind, codes, layout)


def group_axis(in_features: int, num_groups: int) -> StoredAxis | None:
    """Return what a dimension counts that has an entry for each group of inputs."""
    if num_groups == 1:
        return None
    return StoredAxis(1, 0 if in_features % num_groups else in_features // num_groups)


def code_kind(bits: int, in_features: int, num_groups: int, *, offsets: bool) -> CodeKind | None:
    """Return the form in memory of integers in groups along the inputs; None if groups of 32 do not divide the
    inputs."""
    if bits not in (4, 8) or in_features % num_groups or (in_features // num_groups) % GROUP_SIZE:
        return None
    return CodeKind(cast(Literal[4, 8], bits), in_features // num_groups, has_offsets=bits == 4 or offsets)


def group_codes(
    bits: Literal[4, 8], integers: Array, scales: Array, zeros: Array | None, order: NDArray[np.int64] | None = None
) -> GroupCodes:
    """Return quantized values with weight = (integers - zeros) * scales.

    integers: uint8 [out, in], or with 8 bits and without zeros int8; scales and zeros: [out, groups] of any type.
    `order`: the order of the inputs in which groups are runs.
    """
    integers = integers if order is None else integers[:, order]
    scales = widened(scales)
    if zeros is None:
        return GroupCodes(bits, integers, scales, None, order)
    if bits == 4:
        return GroupCodes(4, integers, scales, -zeros.astype(np.float32) * scales, order)
    signed = (integers ^ np.uint8(128)).view(np.int8)
    return GroupCodes(8, signed, scales, (128 - zeros.astype(np.float32)) * scales, order)


@dataclass(frozen=True)
class Groups:
    """The group of each input of a matrix."""

    of_input: NDArray[np.int64]
    """[in]."""
    order: NDArray[np.int64] | None
    """Indices of the inputs sorted by group; None: they are sorted already."""
    are_runs: bool
    """Whether sorted inputs form groups of one size."""


def groups_of(stored: Stored, index: str | None, in_features: int, num_groups: int) -> Groups:
    """Return the groups of a matrix. Raises `LoadError`.

    `index`: the tensor with each input's group, as act-order needs; None: runs of one size.
    """
    runs = np.arange(in_features) // -(-in_features // num_groups)
    if index is None or not stored.has(index):
        return Groups(runs, None, are_runs=True)
    check_shape(stored, index, (in_features,))
    of_input = stored.read(index).astype(np.int64)
    if np.array_equal(of_input, runs) or int(of_input.max()) < 0:
        return Groups(runs, None, are_runs=True)
    low, high = int(of_input.min()), int(of_input.max())
    if low < 0 or high >= num_groups:
        raise LoadError(
            "ModelUnreadable",
            f"{stored.where}: tensor `{index}` names the group {low if low < 0 else high} of {num_groups}. {REMEDY}",
        )
    order = of_input.argsort(kind="stable")
    return Groups(of_input, order, are_runs=np.array_equal(of_input[order], runs))


def spread(integers: Array, scales: Array, zeros: Array | None, group_of: NDArray[np.int64]) -> NDArray[np.float32]:
    """Dequantize to [out, in], where input i belongs to group `group_of[i]`. Other arguments: as for `group_codes`."""
    values = integers.astype(np.float32)
    if zeros is not None:
        values -= zeros.astype(np.float32)[:, group_of]
    values *= widened(scales)[:, group_of]
    return values


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Unpack int32 [n, m] to uint8 [n, m * 32 / bits]; the lowest bits come first. `bits`: 4 or 8."""
    octets = np.ascontiguousarray(words, dtype=np.int32).view(np.uint8)
    return octets if bits == 8 else np.stack((octets & 15, octets >> 4), -1).reshape(len(octets), -1)


def check_shape(stored: Stored, name: str, *allowed: tuple[int, ...]) -> None:
    """Raise `LoadError` for a tensor that is absent or has another shape."""
    found = stored.shape(name) if stored.has(name) else None
    if found in allowed:
        return
    wanted = " or ".join(str(list(shape)) for shape in allowed)
    what = "is not there" if found is None else f"has the shape {list(found)}"
    raise LoadError(
        "ModelUnreadable",
        f"{stored.where}: tensor `{name}` {what}; {wanted} is wanted. {REMEDY}",
    )


FLOAT_TYPES = ("F16", "BF16", "F32", "F64")
WORD_TYPES = ("I32",)


def check_type(stored: Stored, name: str, *allowed: str) -> None:
    """Raise `LoadError` for a tensor of another type: integers that are stored as floats have other bits."""
    found = stored.dtype(name) if stored.has(name) else allowed[0]  # `check_shape` says what is absent
    if found not in allowed:
        raise LoadError(
            "ModelUnreadable",
            f"{stored.where}: tensor `{name}` is stored as {found}; {' or '.join(allowed)} is wanted. {REMEDY}",
        )


def two_sizes(stored: Stored, name: str) -> tuple[int, int]:
    """Return the sizes of a stored matrix. Raises `LoadError` for a tensor that is none, or is empty."""
    shape = stored.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise LoadError(
            "ModelUnreadable",
            f"{stored.where}: tensor `{name}` has the shape {list(shape)}; a matrix is wanted. {REMEDY}",
        )
    return shape[0], shape[1]


def unsupported(stored: Stored, what: str) -> LoadError:
    return LoadError(
        "UnsupportedQuantization",
        f"{stored.where}: `quantization_config` of config.json has {what}, which is not read. Use the model's float32, "
        "float16 or bfloat16 checkpoint, or a GGUF file of it.",
    )


def integer_setting(stored: Stored, settings: Settings, *keys: str, allowed: tuple[int, ...]) -> int:
    """Return the first of `keys` that is set. Raises `LoadError` for a value that is not in `allowed`."""
    key = next((each for each in keys if settings.get(each) is not None), keys[0])
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise unsupported(stored, f"`{key}` {value!r} ({' or '.join(map(str, allowed))} is read)")
    return value


def num_groups(settings: Settings, in_features: int) -> int:
    """Return the number of groups along the inputs by the settings alone."""
    size = settings.get("group_size", settings.get("q_group_size"))
    return -(-in_features // size) if isinstance(size, int) and size > 0 else 1


def group_size_in_words(settings: Settings) -> list[str]:
    size = settings.get("group_size", settings.get("q_group_size"))
    if not isinstance(size, int):
        return []
    return [f"groups of {size}" if size > 0 else "a scale for each output"]


def bases(stored: Stored, ending: str) -> list[str]:
    """Return the names that end with `ending`, without it."""
    return [name.removesuffix(ending) for name in stored.names() if name.endswith(ending)]

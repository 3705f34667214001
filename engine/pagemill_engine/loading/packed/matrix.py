"""A packed matrix: its shape, what it is read as, and the stored tensors that it is made of.

Helpers for all formats: taking integers out of 32-bit words, and making `GroupCodes` of integers, scales and zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pagemill_engine.loading.codes import CodeKind
from pagemill_engine.loading.errors import LoadError
from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes

WORD_BITS = 32


class Stored(Protocol):
    """The tensors of a folder as they are stored."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    def names(self) -> Iterable[str]: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """As safetensors names it, for example `F8_E4M3`."""
        ...

    def read(self, name: str) -> Tensor: ...


Settings = dict[str, Any]
"""`quantization_config` of `config.json`."""


@dataclass(frozen=True)
class PackedMatrix:
    shape: tuple[int, int]
    """[out, in]"""
    parts: tuple[str, ...]
    """The stored tensors."""
    floats: Callable[[], Tensor]
    """The values, float32 [out, in]."""
    kind: CodeKind | None = None
    codes: Callable[[], GroupCodes] | None = None
    """There where `kind` is; they have the values of `floats`."""


def coded(
    shape: tuple[int, int], parts: tuple[str, ...], kind: CodeKind, codes: Callable[[], GroupCodes]
) -> PackedMatrix:
    return PackedMatrix(shape, parts, lambda: codes().dequantize(), kind, codes)


def code_kind(bits: int, in_features: int, num_groups: int, *, offsets: bool) -> CodeKind | None:
    """What integers in groups along the inputs are in memory; `None` where groups of 32 do not divide them."""
    if bits not in (4, 8) or in_features % num_groups or (in_features // num_groups) % GROUP_SIZE:
        return None
    return CodeKind(4, has_offsets=True) if bits == 4 else CodeKind(8, has_offsets=offsets)


def group_codes(bits: Literal[4, 8], integers: Tensor, scales: Tensor, zeros: Tensor | None) -> GroupCodes:
    """weight = (integers - zeros) * scales.

    integers: uint8 [out, in], or with 8 bits and without zeros int8; scales and zeros: [out, groups] of any type.
    """
    repeats = integers.shape[1] // scales.shape[1] // GROUP_SIZE
    scales = scales.float().repeat_interleave(repeats, 1)
    if zeros is None:
        return GroupCodes(bits, integers, scales, None)
    zeros = zeros.float().repeat_interleave(repeats, 1)
    if bits == 4:
        return GroupCodes(4, integers, scales, -zeros * scales)
    signed = (integers.to(torch.int16) - 128).to(torch.int8)
    return GroupCodes(8, signed, scales, (128 - zeros) * scales)


def spread(integers: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor) -> Tensor:
    """float32 [out, in] where input i belongs to group `group_of[i]`; other arguments as for `group_codes`."""
    values = integers.float()
    if zeros is not None:
        values -= zeros.float()[:, group_of]
    return values * scales.float()[:, group_of]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] to uint8 [n, m * 32 / bits]; the lowest bits come first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    integers: Tensor = (words.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    return integers.to(torch.uint8).flatten(-2)


def check_shape(stored: Stored, name: str, *allowed: tuple[int, ...]) -> None:
    """Raises `LoadError` for a tensor that is absent or of another shape."""
    found = stored.shape(name) if stored.has(name) else None
    if found in allowed:
        return
    wanted = " or ".join(str(list(shape)) for shape in allowed)
    what = "is not there" if found is None else f"has the shape {list(found)}"
    raise LoadError(
        "ModelUnreadable",
        f"{stored.where}: tensor `{name}` {what}; {wanted} is wanted. Fetch the folder again and compare its files "
        "with the publisher's.",
    )


def unsupported(stored: Stored, what: str) -> LoadError:
    return LoadError(
        "UnsupportedQuantization",
        f"{stored.where}: `quantization_config` of config.json has {what}, which is not read. Use the model's float32, "
        "float16 or bfloat16 checkpoint, or a GGUF file of it.",
    )


def integer_setting(stored: Stored, settings: Settings, *keys: str, allowed: tuple[int, ...]) -> int:
    """The first of `keys` that is there. Raises `LoadError` for a value that is not in `allowed`."""
    key = next((each for each in keys if settings.get(each) is not None), keys[0])
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise unsupported(stored, f"`{key}` {value!r} ({' or '.join(map(str, allowed))} is read)")
    return value


def bases(stored: Stored, ending: str) -> list[str]:
    """What stands before the ending in the names that have it."""
    return [name.removesuffix(ending) for name in stored.names() if name.endswith(ending)]

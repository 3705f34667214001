"""Packed matrices that other projects wrote, and a folder of tensors in memory, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagemill_kernels.arrays import Array
from pagemill_kernels.torch_arrays import from_torch

RECORDS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "engine" / "model" / "packed_by_others.json").read_text()
)
SMALL_FLOATS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
INTEGERS = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
DTYPES = {**INTEGERS, **FLOATS, **SMALL_FLOATS}


class Folder:
    """A checkpoint whose tensors are in memory."""

    where = "`folder`"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        found = self.tensors[name].dtype
        return next(name for name, dtype in DTYPES.items() if dtype == found)

    def read(self, name: str) -> Array:
        stored = self.tensors[name]
        return from_torch(stored.view(torch.uint8) if stored.dtype in SMALL_FLOATS.values() else stored)


def tensors_of(record: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.tensor(each["values"], dtype=getattr(torch, each["dtype"])).view(each["shape"])
        for name, each in record["tensors"].items()
    }

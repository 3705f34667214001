"""Adapters of a step for models that torch runs on the CPU with native kernels; latents and single experts by torch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagemill_kernels.adapters.native import NativeAdapterRows
from pagemill_kernels.adapters.reference import AdapterMatrices, PlainAdapterRows
from pagemill_kernels.torch_arrays import from_torch


class NativeTensorRows:
    def __init__(self, native: NativeAdapterRows, plain: PlainAdapterRows) -> None:
        """Wrap the same adapters in both forms."""
        self.native, self._plain = native, plain

    def add_to(self, number: int, out: Tensor, x: Tensor) -> None:
        self.native.add_to(number, from_torch(out), from_torch(x))

    def add_to_many(self, first: int, experts: Tensor, out: Tensor, x: Tensor, rows: Tensor) -> None:
        self._plain.add_to_many(first, experts, out, x, rows)

    def add_rows(self, number: int, out: Tensor, ids: Tensor) -> None:
        self.native.add_rows(number, from_torch(out), from_torch(ids))

    def matrices(self, number: int) -> Iterator[tuple[Tensor, AdapterMatrices]]:
        return self._plain.matrices(number)

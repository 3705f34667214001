"""Adapters of a step for the native kernels: A and B in bfloat16 panels, sums in float32 (cpu/src/adapters.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address
from pagemill_kernels.cpu import launch, library

PANEL, RANKS = library.ADAPTER_PANEL, library.ADAPTER_RANKS


class PartOfB(NamedTuple):
    """What an adapter adds to some of a product's outputs; a product of stacked matrices has a part for each."""

    first_output: int
    first_rank: int
    """The first of A's rows whose sums it reads."""
    b: Array
    """float32 [outputs, rank], multiplied by the adapter's scale."""


class PackedAdapter:
    """An adapter's matrices for one linear layer."""

    def __init__(self, a: Array, parts: Sequence[PartOfB]) -> None:
        """Pack matrices. `a`: float32 or bits of bfloat16 [rank, in], the stacked ones of all parts."""
        rank, self.in_features = a.shape
        padded = -(-rank // RANKS) * RANKS
        self._a = arrays.empty((self.in_features, padded), np.uint16)
        self._a[...] = 0
        self._a[:, :rank] = a.T if a.dtype == np.uint16 else arrays.rounded(a).T
        self._sizes = [(part.first_output, part.first_rank, *part.b.shape) for part in parts]
        self._b = [_panels(part.b) for part in parts]
        self._parts = (library.AdapterPart * len(parts))(
            *(
                library.AdapterPart(first_output=output, outputs=outputs, first_rank=first, rank=rank, b=address(b))
                for (output, first, outputs, rank), b in zip(self._sizes, self._b, strict=True)
            )
        )
        self._matrices = library.AdapterWeights(
            rank=padded, a=address(self._a), num_parts=len(parts), parts=ctypes.addressof(self._parts)
        )
        self.address = ctypes.addressof(self._matrices)
        """Address of the C structure; valid as long as this object lives."""

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + sum(b.nbytes for b in self._b)

    def rows(self, ids: Array, size: int) -> Array:
        """Return what it adds to embeddings of `size` values, float32 [tokens, size]: B times columns of A."""
        shrunk = arrays.widened(self._a[ids])
        out = np.zeros((len(ids), size), dtype=np.float32)
        for (output, first, outputs, rank), b in zip(self._sizes, self._b, strict=True):
            whole = arrays.widened(b).transpose(0, 2, 1).reshape(-1, rank)[:outputs]
            out[:, output : output + outputs] += shrunk[:, first : first + rank] @ whole.T
        return out


def pack(a: Array, b: Array) -> PackedAdapter:
    """Pack the matrices of a whole product. a: float32 [rank, in]; b: float32 [out, rank]."""
    return PackedAdapter(a, [PartOfB(0, 0, b)])


class NativeAdapters:
    """All loaded adapters, by slot and by the number of a linear layer."""

    def __init__(
        self, loaded: Mapping[int, Mapping[int, PackedAdapter]], num_linears: int, num_slots: int | None = None
    ) -> None:
        """`num_slots`: by default as many as `loaded` needs."""
        self.loaded: dict[int, Mapping[int, PackedAdapter]] = {}
        self.num_slots = max(loaded, default=-1) + 1 if num_slots is None else num_slots
        self.num_linears = num_linears
        self.matrices = (ctypes.c_void_p * (self.num_slots * num_linears))()
        for slot, packed in loaded.items():
            self.place(slot, packed)

    def place(self, slot: int, packed: Mapping[int, PackedAdapter]) -> None:
        """Replace the adapter of a slot, which no step uses meanwhile."""
        first = slot * self.num_linears
        for number in self.loaded.get(slot, ()):
            self.matrices[first + number] = None
        for number, matrices in packed.items():
            self.matrices[first + number] = matrices.address
        self.loaded[slot] = packed

    def rows(self, slots: Array) -> NativeAdapterRows:
        """Return the adapters of a step's rows. `slots`: int32 [rows], the slot of each row's adapter, or -1."""
        return NativeAdapterRows(self, slots)


class NativeAdapterRows:
    def __init__(self, adapters: NativeAdapters, slots: Array) -> None:
        self._adapters = adapters
        self._slots = np.ascontiguousarray(slots, dtype=np.int32)
        self._rows = library.StepAdapters(
            slots=address(self._slots),
            num_slots=adapters.num_slots,
            num_linears=adapters.num_linears,
            matrices=ctypes.addressof(adapters.matrices),
        )
        self.address = ctypes.addressof(self._rows)
        """Address of the C structure; valid as long as this object lives."""

    def add_to(self, number: int, out: Array, x: Array) -> None:
        """Compute `reference.PlainAdapterRows.add_to`. out, x: float32, rows of adjacent values."""
        of = library.AdaptedRows(slots=0, divisor=1, first=0)
        launch.native().pagemill_add_adapters(
            self.address,
            number,
            address(x),
            len(x),
            x.shape[1],
            launch.row_stride(x),
            of,
            address(out),
            launch.row_stride(out),
            launch.num_threads(),
        )

    def add_rows(self, number: int, out: Array, ids: Array) -> None:
        """Compute `reference.PlainAdapterRows.add_rows`."""
        for slot in np.unique(self._slots[self._slots >= 0]).tolist():
            packed = self._adapters.loaded.get(slot, {}).get(number)
            if packed is not None:
                own = np.nonzero((self._slots == slot) & (ids >= 0))[0]
                out[own] += packed.rows(ids[own], out.shape[1])


def _panels(b: Array) -> Array:
    """Return B as bfloat16 [panels of outputs, rank, PANEL], the last one padded with zeros."""
    outputs, rank = b.shape
    padded = np.zeros((-(-outputs // PANEL) * PANEL, rank), dtype=np.float32)
    padded[:outputs] = b
    panels = arrays.empty((len(padded) // PANEL, rank, PANEL), np.uint16)
    panels[...] = arrays.rounded(padded).reshape(-1, PANEL, rank).transpose(0, 2, 1)
    return panels

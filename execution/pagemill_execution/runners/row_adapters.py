"""The adapters of a runner's rows: each adapter that rows use has a slot in the kernels' tables.

Adapters are named by their digests, with which sequences are admitted; the store has their matrices. A slot keeps its
adapter until another one needs it, so that rows that come and go place nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.adapters.native import NativeAdapters
from pagemill_kernels.arrays import Array
from pagemill_models.sharding.linears import linears

if TYPE_CHECKING:
    from pagemill_execution.adapters.packing import Packed
    from pagemill_execution.adapters.store import AdapterLimits, LoadedAdapter
    from pagemill_models.declaration.declaration import DecoderSpec


class HeldAdapters(Protocol):
    limits: AdapterLimits

    def get(self, digest: str) -> LoadedAdapter:
        """Return a loaded adapter."""


class AdapterTables(Protocol):
    """The matrices of all slots, as an executor's kernels read them."""

    def place(self, slot: int, packed: Packed) -> None:
        """Replace the adapter of a slot that no row uses."""

    def rows(self, slots: Array) -> Any:
        """Return the adapters of a step's rows. `slots`: int32 [rows], the slot of each row's adapter, or -1."""


class TorchTables:
    """For models that torch computes, on the CPU: products of the formulas."""

    def __init__(self) -> None:
        self._loaded: dict[int, Packed] = {}

    def place(self, slot: int, packed: Packed) -> None:
        self._loaded[slot] = packed

    def rows(self, slots: Array) -> Any:
        import torch

        from pagemill_kernels.adapters.reference import PlainAdapterRows

        return PlainAdapterRows(torch.from_numpy(slots).long(), self._loaded)


class RowAdapters:
    def __init__(self, store: HeldAdapters, tables: AdapterTables, max_rows: int) -> None:
        self._store, self._tables = store, tables
        num_slots = store.limits.max_loras
        self._digests = [""] * num_slots
        self._users = [0] * num_slots
        self._slots: NDArray[np.int32] = np.full(max_rows, -1, dtype=np.int32)

    def release(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._leave(row)

    def admit(self, row: int, digest: str) -> None:
        """Give a row its adapter; "": none. Raises RuntimeError if rows use all slots."""
        self._leave(row)
        if digest:
            slot = self._slot_of(digest)
            self._users[slot] += 1
            self._slots[row] = slot

    def of(self, rows: NDArray[np.int64]) -> Any:
        """Return the adapters of a step's rows; None: no row has one."""
        slots = self.slots(rows)
        return self._tables.rows(slots) if (slots >= 0).any() else None

    def slots(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        """Return the slot of each row's adapter, or -1."""
        slots: NDArray[np.int32] = self._slots[rows]
        return slots

    def resident(self) -> Iterator[str]:
        yield from filter(None, self._digests)

    def _leave(self, row: int) -> None:
        slot = self._slots[row]
        if slot >= 0:
            self._users[slot] -= 1
            self._slots[row] = -1

    def _slot_of(self, digest: str) -> int:
        if digest in self._digests:
            return self._digests.index(digest)
        free = [slot for slot, users in enumerate(self._users) if users == 0]
        if not free:
            raise RuntimeError(f"rows use all {len(self._users)} slots of adapters")
        slot = next((slot for slot in free if not self._digests[slot]), free[0])
        self._tables.place(slot, self._store.get(digest).packed)
        self._digests[slot] = digest
        return slot


def row_adapters(store: HeldAdapters, decoder: DecoderSpec, max_rows: int, *, natively: bool) -> RowAdapters:
    """`decoder`: of the model, or of the part of it, that the runner's kernels compute."""
    tables: AdapterTables = TorchTables()
    if natively:
        tables = NativeAdapters({}, len(linears(decoder)), store.limits.max_loras)
    return RowAdapters(store, tables, max_rows)

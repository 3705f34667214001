"""Adapters of a model that several ranks compute: each rank reads the same folder, and keeps its part of the values.

Rank 0's `AdapterStore` decides what is loaded and dropped. An adapter is loaded once all ranks have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Protocol
from weakref import finalize

import numpy as np

from pagemill_engine.adapters.packing import Pack, Packed
from pagemill_engine.adapters.reading import AdapterValues, PartOfAdapter, Pause
from pagemill_engine.adapters.store import AdapterStore, LoadedAdapter
from pagemill_kernels.arrays import Array
from pagemill_models.adapters.errors import unreadable
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.linears import LinearUse, linears
from pagemill_models.sharding.slices import Slices, TensorSlice


def pack_part(pack: Pack, own: DecoderSpec, slices: Slices, first_layer: int) -> Pack:
    """Return a function that packs a rank's part of a whole model's adapter.

    `own`: the rank's declaration, whose layers are those from `first_layer` on.
    """
    uses = {(None if use.layer is None else use.layer + first_layer, use.role, use.expert): use for use in linears(own)}

    def packed(decoder: DecoderSpec, values: AdapterValues, pause: Pause = lambda: None) -> Packed:
        parts = []
        for part in values.parts:
            use = uses.get((part.use.layer, part.use.role, part.use.expert))
            kept = None if use is None else _part(part, use, slices)
            if kept is not None:
                parts.append(kept)
        return pack(own, values._replace(parts=parts), pause)

    return packed


def _part(part: PartOfAdapter, own: LinearUse, slices: Slices) -> PartOfAdapter | None:
    """Return the rows of B and the columns of A that belong to what a rank has of a linear layer."""
    firsts = {stored.name: stored.first for stored in own.stored()}
    end = part.first_row + len(part.b)
    if own.is_table:
        (stored,) = part.use.stored()
        return PartOfAdapter(own, 0, _cut(part.a, 1, slices.get(stored.name)), part.b)
    kept = [each for each in part.use.stored() if part.first_row <= each.first < end and each.name in firsts]
    if not kept:
        return None
    rows = [
        _cut(part.b[each.first - part.first_row : each.end - part.first_row], 0, slices.get(each.name)) for each in kept
    ]
    a = _cut(part.a, 1, slices.get(kept[0].name), dimension=1)
    return PartOfAdapter(own, firsts[kept[0].name], a, np.concatenate(rows))


def _cut(values: Array, axis: int, found: TensorSlice | None, dimension: int = 0) -> Array:
    """Return what a slice of a stored matrix leaves, if it divides this dimension of the matrix."""
    if found is None or found.dimension != dimension:
        return values
    at = np.concatenate([np.arange(first, end) for first, end in found.ranges])
    return np.ascontiguousarray(values.take(at, axis))


class _Held:
    """Lives as long as rank 0 has an adapter."""


class SendRead(Protocol):
    def __call__(self, number: int, folder: str, digest: str, dropped: list[int]) -> None:
        """Ask all followers to read an adapter, and to drop earlier ones."""


class AdaptersOfFollowers:
    """Rank 0's end."""

    def __init__(self, send: SendRead, answers: Callable[[], list[str]]) -> None:
        """`answers`: waits for an answer of each follower, and returns what is wrong: "" if nothing is."""
        self._send, self._answers = send, answers
        self._numbers = count()
        self._dropped: deque[int] = deque()

    def read(self, folder: Path, digest: str) -> object:
        """Let all followers read a folder, and return what they keep it for. Raises `AdapterError`."""
        held, number = _Held(), next(self._numbers)
        finalize(held, self._dropped.append, number)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._send(number, str(folder), digest, dropped)
        wrong = list(filter(None, self._answers()))
        if wrong:
            raise unreadable(f"Not all ranks could read the adapter: {wrong[0]}")
        return held


class FollowedAdapters:
    """A follower's end: reads on a thread of its own, beside the steps."""

    def __init__(self, store: AdapterStore, answer: Callable[[str], None]) -> None:
        """`store` reads; what is kept is decided by rank 0."""
        self.limits = store.limits
        self._store, self._answer = store, answer
        self._held: dict[int, LoadedAdapter] = {}

    def read(self, number: int, folder: str, digest: str, dropped: list[int]) -> None:
        for each in dropped:
            self._held.pop(each, None)

        def finish(done: Future[LoadedAdapter]) -> None:
            error = done.exception()
            if error is not None:
                self._answer(str(error) or type(error).__name__)
            elif done.result().digest != digest:
                self._answer(f"`{folder}` changed while it was read. Load the adapter again once it is complete.")
            else:
                self._held[number] = done.result()
                self._answer("")

        self._store.read(Path(folder)).add_done_callback(finish)

    def get(self, digest: str) -> LoadedAdapter:
        return next(each for each in list(self._held.values()) if each.digest == digest)

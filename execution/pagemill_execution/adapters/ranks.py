"""Adapters of a model that several ranks compute: each rank reads the same files, and keeps its part of the values.

Followers on other nodes get the files from rank 0. Its `AdapterStore` decides what is loaded and dropped. An adapter is
loaded once all ranks have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import finalize

import numpy as np

from pagemill_execution.adapters.messages import AdapterMessage, AdapterPiece, ReadAdapter
from pagemill_execution.adapters.packing import Pack, Packed
from pagemill_execution.adapters.reading import AdapterValues, PartOfAdapter, Pause
from pagemill_execution.adapters.store import AdapterStore, LoadedAdapter
from pagemill_kernels.arrays import Array
from pagemill_models.adapters.errors import unreadable
from pagemill_models.adapters.folder import files_of
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


_PIECE_BYTES = 32 * 1024
"""A plan may wait for a piece, and a piece fits into a slot of the ring."""


class _Held:
    """Lives as long as rank 0 has an adapter."""


class AdaptersOfFollowers:
    """Rank 0's end."""

    def __init__(
        self, send: Callable[[AdapterMessage], None], answers: Callable[[], list[str]], *, sends_files: bool = False
    ) -> None:
        """`send`: to all followers. `answers`: waits for an answer of each, and returns what is wrong: "" if nothing
        is. `sends_files`: followers are on other nodes, which may lack the folders."""
        self._send, self._answers, self._sends_files = send, answers, sends_files
        self._numbers = count()
        self._dropped: deque[int] = deque()

    def read(self, folder: Path, digest: str) -> object:
        """Let all followers read a folder, and return what they keep it for. Raises `AdapterError`."""
        held, number = _Held(), next(self._numbers)
        finalize(held, self._dropped.append, number)
        if self._sends_files:
            self._send_files(number, folder)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._send(ReadAdapter(number, "" if self._sends_files else str(folder), digest, dropped))
        wrong = list(filter(None, self._answers()))
        if wrong:
            raise unreadable(f"Not all ranks could read the adapter: {wrong[0]}")
        return held

    def _send_files(self, number: int, folder: Path) -> None:
        try:
            for path in files_of(folder):
                with path.open("rb") as file:
                    while data := file.read(_PIECE_BYTES):
                        self._send(AdapterPiece(number, path.name, data))
        except OSError as error:
            raise unreadable(f"`{folder}` could not be read again for the other ranks: {error}.") from error


class FollowedAdapters:
    """A follower's end: reads on a thread of its own, beside the steps."""

    def __init__(self, store: AdapterStore, answer: Callable[[str], None]) -> None:
        """`store` reads; what is kept is decided by rank 0."""
        self.limits = store.limits
        self._store, self._answer = store, answer
        self._held: dict[int, LoadedAdapter] = {}
        self._received: dict[int, _Received] = {}

    def read(self, message: AdapterMessage) -> None:
        if isinstance(message, AdapterPiece):
            self._received.setdefault(message.number, _Received()).take(message)
            return
        for each in message.dropped:
            self._held.pop(each, None)
            unread = self._received.pop(each, None)
            if unread is not None:
                unread.remove()
        received = None if message.folder else self._received.pop(message.number, None)
        if received is not None and received.error is not None:
            received.remove()
            self._answer(f"its files cannot be kept: {received.error}")
            return
        folder = Path(message.folder) if received is None else received.path

        def finish(done: Future[LoadedAdapter]) -> None:
            error = done.exception()
            if received is not None:
                received.remove()
            if error is not None:
                self._answer(str(error) or type(error).__name__)
            elif done.result().digest != message.digest:
                self._answer(f"`{folder}` changed while it was read. Load the adapter again once it is complete.")
            else:
                self._held[message.number] = done.result()
                self._answer("")

        self._store.read(folder).add_done_callback(finish)

    def get(self, digest: str) -> LoadedAdapter:
        return next(each for each in list(self._held.values()) if each.digest == digest)


class _Received:
    """The files of an adapter that rank 0 sends, in a folder that lasts until they are read."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self.error: OSError | None = None

    @property
    def path(self) -> Path:
        return Path("" if self._folder is None else self._folder.name)

    def take(self, piece: AdapterPiece) -> None:
        try:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="pagemill-adapter-", ignore_cleanup_errors=True)
            with (self.path / Path(piece.file).name).open("ab") as file:
                file.write(piece.data)
        except OSError as error:
            self.error = error

    def remove(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

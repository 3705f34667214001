"""Adapters on the host: which are known, which are loaded, and which are dropped for others.

Loading runs on a thread beside the steps. At most `max_cpu_loras` are kept: those first that are in use or needed soon,
then pinned ones, then those used last. A known adapter that was dropped is loaded again from its folder. All methods
are called by the engine's loop; `get` also by a runner's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pagemill_execution.adapters.packing import Pack, Packed, num_bytes
from pagemill_execution.adapters.reading import Pause, ReadBase, read_values
from pagemill_models.adapters.errors import AdapterError
from pagemill_models.adapters.folder import another_base, read_adapter
from pagemill_models.declaration.declaration import DecoderSpec

logger = logging.getLogger(__name__)

PIECE_S = 0.003
"""Processor time of a load beside one step, at least one tensor."""
LONGEST_STEP_S = 1.0
"""After this a load goes on, whatever the steps do."""


class LoadedAdapter(NamedTuple):
    digest: str
    rank: int
    packed: Packed
    num_bytes: int
    warning: str | None
    load_ms: float
    held: object = None
    """What other ranks keep the adapter for."""


class AdapterLimits(NamedTuple):
    max_loras: int
    """Adapters that steps may use at once."""
    max_lora_rank: int
    max_cpu_loras: int
    """Adapters that are kept on the host, those in slots included."""


class Pace:
    """Divides loads into pieces, one beside each step: a step waits for the slowest of its threads, and a load takes a
    core from one of them."""

    def __init__(self) -> None:
        self.is_free = True
        """Whether no step runs: loads do not wait."""
        self._turn = threading.Event()

    def turn(self) -> None:
        """Let the next piece begin."""
        self._turn.set()

    def begin(self) -> Pause:
        """Return what a load calls between its tensors."""
        piece_end_s = time.thread_time() + PIECE_S

        def pause() -> None:
            nonlocal piece_end_s
            if time.thread_time() < piece_end_s:
                return
            if not self.is_free:
                self._turn.clear()
                self._turn.wait(LONGEST_STEP_S)
            piece_end_s = time.thread_time() + PIECE_S

        return pause


class AdapterStore:
    def __init__(self, decoder: DecoderSpec, model: str, limits: AdapterLimits, pack: Pack, base: ReadBase) -> None:
        """`model`: the base's name, for warnings. `base`: reads the base's matrices, to compare saved copies."""
        self.limits = limits
        self._decoder, self._model, self._pack, self._base = decoder, model, pack, base
        self._folders: dict[str, Path] = {}
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._loading: dict[str, Future[LoadedAdapter]] = {}
        self.read_elsewhere: Callable[[Path, str], object] | None = None
        """Lets other ranks read a folder, whose content has a digest. Raises `AdapterError`."""
        self._in_use: Callable[[str], bool] = lambda digest: False
        self._pinned: set[str] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "adapters")
        self.pace = Pace()
        self.load_ms = 0.0
        """Milliseconds that the latest load took."""
        self.num_loads = 0
        self.num_evictions = 0

    def keep_while(self, in_use: Callable[[str], bool]) -> None:
        """Never drop the adapters, by digest, for which `in_use` is true. It is true for `max_cpu_loras` at most."""
        self._in_use = in_use

    @property
    def loaded(self) -> list[str]:
        return list(self._loaded)

    @property
    def loading(self) -> list[str]:
        return list(self._loading)

    @property
    def futures(self) -> list[Future[LoadedAdapter]]:
        return list(self._loading.values())

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._loaded.values())

    def read(self, folder: Path) -> Future[LoadedAdapter]:
        """Read an adapter's folder on the thread, and pack it. The future raises `AdapterError`."""
        return self._thread.submit(self._read, folder)

    def add(self, folder: Path, adapter: LoadedAdapter, *, pinned: bool = False) -> None:
        """Know an adapter, which was read from `folder`, and keep it as long as there is room."""
        self._folders[adapter.digest] = folder
        (self._pinned.add if pinned else self._pinned.discard)(adapter.digest)
        self._keep(adapter)
        if pinned and len(self._pinned) > self.limits.max_cpu_loras:
            logger.warning(
                "%d adapters are pinned and %d are kept in memory: others are loaded again when they are asked for. "
                "Raise max_cpu_loras.", len(self._pinned), self.limits.max_cpu_loras
            )  # fmt: skip

    def forget(self, digest: str) -> None:
        """Accept no further requests for an adapter. Running ones keep it."""
        self._folders.pop(digest, None)
        self._pinned.discard(digest)
        self.release(digest)

    def release(self, digest: str) -> None:
        """Drop an adapter that is forgotten and no longer in use."""
        if digest not in self._folders and not self._in_use(digest):
            self.stop_loading(digest)
            with self._lock:
                self._loaded.pop(digest, None)

    def knows(self, digest: str) -> bool:
        return digest in self._folders

    def get(self, digest: str) -> LoadedAdapter:
        """Return a loaded adapter."""
        with self._lock:
            return self._loaded[digest]

    def touch(self, digest: str) -> None:
        """Count a loaded adapter as used now. Those in a slot are not asked for by `get` again."""
        with self._lock:
            self._loaded.move_to_end(digest)

    def fetch(self, digest: str) -> bool:
        """Return whether an adapter is loaded; begin to load it if not. Raises `AdapterError` if that failed."""
        if digest in self._loaded:
            return True
        future = self._loading.get(digest)
        if future is None:
            self._loading[digest] = self.read(self._folders[digest])
            return False
        if not future.done():
            return False
        del self._loading[digest]
        adapter = future.result()
        if adapter.digest != digest:
            raise AdapterError(
                "AdapterChanged",
                f"`{self._folders[digest]}` has other content than when it was loaded. Load it again by its name.",
            )
        self._keep(adapter)
        return True

    def stop_loading(self, digest: str) -> None:
        """Drop a load that no request needs any more."""
        future = self._loading.pop(digest, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, folder: Path) -> LoadedAdapter:
        started_s = time.monotonic()
        pause = self.pace.begin()
        files = read_adapter(folder, self._decoder, self.limits.max_lora_rank)
        values = read_values(files, self._base, pause)
        packed = self._pack(self._decoder, values, pause)
        held = None if self.read_elsewhere is None else self.read_elsewhere(folder, values.digest)
        warning = another_base(files, self._model)
        if warning is not None:
            logger.warning(warning)
        load_ms = (time.monotonic() - started_s) * 1000
        return LoadedAdapter(values.digest, values.rank, packed, num_bytes(packed), warning, load_ms, held)

    def _keep(self, adapter: LoadedAdapter) -> None:
        self.load_ms = adapter.load_ms
        self.num_loads += 1
        with self._lock:
            self._loaded[adapter.digest] = adapter
            self._loaded.move_to_end(adapter.digest)
            excess = len(self._loaded) - self.limits.max_cpu_loras
            free = [digest for digest in self._loaded if not self._in_use(digest)]
            for digest in sorted(free, key=self._pinned.__contains__)[: max(0, excess)]:
                del self._loaded[digest]
                self.num_evictions += 1

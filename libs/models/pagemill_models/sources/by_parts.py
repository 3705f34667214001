"""Models of a network of which each process reads only its parts, for engines on several nodes.

The folder has the model's small files; those of weights, safetensors or GGUF, are sparse: only their headers are there.
`ModelParts` reads all else from the source, and keeps no copy. `resolve` fetches whole models into the machine's cache,
which is better where all parts are on one machine; digests of files of which parts are read cannot be compared.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pagemill_models.files.regular_file import open_regular
from pagemill_models.sources.base import ReadsRanges, RemoteFile, Repository, SourceKind
from pagemill_models.sources.headers import read_safetensors_header, write_gguf_header
from pagemill_models.sources.registry import find_kind
from pagemill_models.sources.schemes.ranges import NUM_RANGES, RANGE_BYTES
from pagemill_models.sources.selection import select_files
from pagemill_models.sources.store.reach import check_reachable
from pagemill_protocol.source_errors import FetchError

PARTS = ".parts.json"
"""Describes where the weights of a folder are."""
SAFETENSORS, GGUF = ".safetensors", ".gguf"
NUM_TRIES, PAUSE_S = 4, 1.0
UNREACHABLE = ("SourceUnreachable", "HubUnreachable")
"""Reasons of faults that may be over a moment later."""


class _Described(msgspec.Struct):
    source: str
    version: str
    files: dict[str, RemoteFile]


def model_in_parts(kind: SourceKind, source: str, least_bytes: int) -> Path | None:
    """Return a folder, or its first GGUF file, whose weights are read from the source. The folder is removed when this
    process ends.

    `kind`: of the source; one of a network. `least_bytes`: of the weights. None: they have another form or are smaller,
    or the server cannot send parts. Raises `FetchError`.
    """
    repository = kind.open(source)
    try:
        check_reachable(kind, source)
        listing = repository.list_files()
        chosen = select_files(repository.name, kind.file_of(source), listing.files)
        weights = _weights(chosen)
        if not isinstance(repository, ReadsRanges) or not weights:
            return None
        if sum(file.num_bytes for file in weights.values()) < least_bytes:
            return None
        folder = Path(tempfile.mkdtemp(prefix="pagemill-parts-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        described = _Described(source, listing.version, weights)
        (folder / PARTS).write_bytes(msgspec.json.encode(described))
        for file in chosen:
            _write(repository, file, listing.version, folder)
    finally:
        repository.close()
    first = next(iter(weights))
    return folder / first if first.endswith(GGUF) else folder


def _weights(chosen: list[RemoteFile]) -> dict[str, RemoteFile]:
    """Return the files of weights by their names in the folder of parts; none if not all of them can be there."""
    if any(file.is_archive for file in chosen):
        return {}
    found = [file for file in chosen if file.path.endswith(GGUF)]
    if found:  # one model, whose files are beside each other
        return {Path(file.path).name: file for file in found}
    found = [file for file in chosen if file.path.endswith(SAFETENSORS)]
    return {} if any("/" in file.path for file in found) else {file.path: file for file in found}


def _write(repository: Repository, file: RemoteFile, version: str, folder: Path) -> None:
    if file.path.endswith(GGUF):
        write_gguf_header(repository, file, version, folder / Path(file.path).name)
        return
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as out:
        if file.path.endswith(SAFETENSORS):
            out.write(read_safetensors_header(repository, file, version))
            out.truncate(file.num_bytes)
            return
        repository.fetch(file, version, out)
    if file.sha256 is not None and hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
        raise FetchError("ModelCorrupt", f"{repository.name}: `{file.path}` has another digest than is published.")


class ModelParts:
    """The weights of a folder as bytes of its source. Any thread may read."""

    def __init__(self, folder: Path) -> None:
        """Open the source of a folder of `model_in_parts`. Raises `FetchError`."""
        with open(open_regular(folder / PARTS, folder), "rb") as file:
            self._described = msgspec.json.decode(file.read(), type=_Described)
        self._repository: Any = find_kind(self._described.source).open(self._described.source)
        self._threads = ThreadPoolExecutor(NUM_RANGES, "parts")
        self.num_bytes = 0
        """Bytes that were read so far."""

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `start` on, over several connections. Raises `FetchError`."""
        self.num_bytes += len(out)
        firsts = range(0, len(out), RANGE_BYTES)
        ranges = [out[first : first + RANGE_BYTES] for first in firsts]
        starts = [start + first for first in firsts]
        for _ in self._threads.map(partial(self._fill, name), starts, ranges):
            pass

    def _fill(self, name: str, start: int, out: memoryview) -> None:
        file = self._described.files[name]
        for attempt in range(1, NUM_TRIES + 1):
            try:
                found = self._repository.read_range(file, self._described.version, start, len(out))
            except FetchError as error:
                if error.reason not in UNREACHABLE or attempt == NUM_TRIES:
                    raise
                time.sleep(PAUSE_S * attempt)
                continue
            if len(found) == len(out):
                out[:] = found
                return
        what = f"`{name}` ends before byte {start + len(out)}"
        raise FetchError("ModelUnreadable", f"{self._repository.name}: {what}. Compare it with the publisher's.")


def has_parts(folder: Path) -> bool:
    """Whether the weights of a folder are read from its source."""
    return (folder / PARTS).is_file()

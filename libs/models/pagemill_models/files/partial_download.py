"""A model that is loaded while it is fetched: a folder of links to files that become whole one after another.

When the folder appears, the small files are whole and each weight file has its header. The folder keeps its place when
the model is published elsewhere, so readers are not affected. `sources.store.fetch` writes it; readers of weights wait
here for the files. A fetch that has ended, for whatever reason, has released its lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_models.files.regular_file import exists, open_regular
from pagemill_protocol.source_errors import UnreadableModelError

SIZES = ".partial.json"
"""JSON object with the final size in bytes of each file that was not whole at first; the fetch holds a lock on it."""
PARENT = ".partial"
"""Name of the parent folder of arriving models, beside the published ones."""
MAX_SIZES_BYTES = 1024 * 1024
POLL_S = 0.02
_decoder = msgspec.json.Decoder(dict[str, int])


def partial_folder(target: Path) -> Path:
    """Return the folder of a model while it arrives. `target`: the folder where it will be published."""
    return target.parent / PARENT / target.name


class FileLink(NamedTuple):
    place: Path
    """Path of the linked file, on the same file system."""
    num_bytes: int
    """Final size."""
    is_complete: bool


class PartialDownload:
    """The fetching side: makes the folder of links and marks files as whole."""

    def __init__(self, target: Path, links: Mapping[str, FileLink]) -> None:
        """Link the files. Raises `OSError` where the file system has no hard links."""
        self.folder = partial_folder(target)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        sizes = {name: link.num_bytes for name, link in links.items() if not link.is_complete}
        self._lock = (self.folder / SIZES).open("wb")
        try:
            self._lock.write(msgspec.json.encode(sizes))
            self._lock.flush()
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name, link in links.items():
                os.link(link.place, self.folder / name)
        except OSError:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def mark_complete(self, name: str) -> None:
        """Mark a file as complete and checked."""
        with suppress(FileNotFoundError):  # a reader that has all it needs may have removed the folder
            _mark(self.folder / name).touch()

    def close(self) -> None:
        self._lock.close()


def awaited_bytes(path: Path) -> int | None:
    """Return the final size in bytes of a file that is still arriving, or None for a whole file."""
    return None if _mark(path).exists() else _sizes(path.parent).get(path.name)


def wait_until_complete(path: Path) -> None:
    """Block until the file is whole. Raises `UnreadableModelError` when the fetch has ended before that."""
    while awaited_bytes(path) is not None:
        if _has_ended(path.parent) and awaited_bytes(path) is not None:
            raise UnreadableModelError(f"`{path.name}` has not arrived: the fetch of the model has ended. Start again.")
        time.sleep(POLL_S)  # another process writes it, perhaps over a network file system


def wait_for_all(folder: Path) -> None:
    """Block until all arriving files of a folder are whole. Raises `UnreadableModelError` as `wait_until_complete`."""
    for name in _sizes(folder):
        wait_until_complete(folder / name)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the final sizes of arriving files; empty where nothing arrives."""
    place = folder / SIZES
    if not exists(place):
        return {}
    try:
        with open(open_regular(place), "rb") as file:
            return _decoder.decode(file.read(MAX_SIZES_BYTES))
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError:
        raise UnreadableModelError(f"`{place}` is not a list of sizes. Remove it.") from None


def _has_ended(folder: Path) -> bool:
    try:
        with (folder / SIZES).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False  # the fetch holds its lock
    return True


def _mark(path: Path) -> Path:
    return path.with_name(f".{path.name}.whole")

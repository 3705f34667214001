"""A model that is loaded while it is fetched: a folder of links to its files, which become whole one after another.

When the folder appears, the small files are whole, and each file of weights has its header. It keeps its place when the
model is published elsewhere, so that who reads it need not know. `sources.store.fetch` writes it; who reads weights
waits for them here. A fetch that has ended, in whatever way, has given its lock back.
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

from pagemill_protocol.source_errors import UnreadableModelError

SIZES = ".arriving.json"
"""Bytes that each file will have which was not whole at first; the fetch holds a lock on it."""
PARENT = ".arriving"
"""Folder of such folders, beside the models."""
POLL_S = 0.02
_decoder = msgspec.json.Decoder(dict[str, int])


def arriving_folder(target: Path) -> Path:
    """`target`: where the model will be published."""
    return target.parent / PARENT / target.name


class Link(NamedTuple):
    place: Path
    """Of the file that is linked, on the same file system."""
    num_bytes: int
    """That it will have."""
    is_whole: bool


class ArrivingFiles:
    """The side that fetches."""

    def __init__(self, target: Path, links: Mapping[str, Link]) -> None:
        """Raises `OSError` where the file system has no links."""
        self.folder = arriving_folder(target)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        sizes = {name: link.num_bytes for name, link in links.items() if not link.is_whole}
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

    def is_whole(self, name: str) -> None:
        """From now on; it was checked."""
        with suppress(FileNotFoundError):  # who loads it has all that it needs
            _mark(self.folder / name).touch()

    def close(self) -> None:
        self._lock.close()


def awaited_bytes(path: Path) -> int | None:
    """Of a file that is still arriving: the bytes that it will have. `None`: it is whole, as other files are."""
    return None if _mark(path).exists() else _sizes(path.parent).get(path.name)


def wait_until_whole(path: Path) -> None:
    """Raises `UnreadableModelError` when the fetch has ended without it."""
    while awaited_bytes(path) is not None:
        if _has_ended(path.parent) and awaited_bytes(path) is not None:
            raise UnreadableModelError(f"`{path.name}` has not arrived: the fetch of the model has ended. Start again.")
        time.sleep(POLL_S)  # another process writes it, perhaps over a network file system


def wait_for_all(folder: Path) -> None:
    """As `wait_until_whole`, of all files."""
    for name in _sizes(folder):
        wait_until_whole(folder / name)


def _sizes(folder: Path) -> dict[str, int]:
    """Empty where nothing arrives."""
    try:
        return _decoder.decode((folder / SIZES).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _has_ended(folder: Path) -> bool:
    try:
        with (folder / SIZES).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False  # it holds its lock
    return True


def _mark(path: Path) -> Path:
    return path.with_name(f".{path.name}.whole")

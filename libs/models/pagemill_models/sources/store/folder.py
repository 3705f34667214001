"""A model's folder on a volume: filled beside its final place and moved there in one step once it is complete.

A folder in its final place is complete: later loaders have nothing to do, and engines never see a partial model.
Loaders of the same folder wait for each other; a killed loader leaves its part files for the next one.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.schemes.hugging_face import MODEL_PATTERNS
from pagemill_models.sources.store.archive import unpack
from pagemill_models.sources.store.part import PartFile
from pagemill_models.sources.store.record import is_intact, write_record
from pagemill_protocol.source_errors import FetchError

PART = ".part"
COMMIT = ".commit"
_PLACES = ("models/", "model/")
"""Folders of images that may contain a model; besides these only files at the root are used."""


class ModelFolder:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.staging = target.with_name(f".{target.name}.loading")
        """Folder of the files until all have arrived."""
        self._lock = target.with_name(f".{target.name}.lock")
        self._sha256: dict[str, str] = {}
        """Digests of files that were read for a check."""

    @property
    def complete(self) -> bool:
        """Whether the folder exists and its files are unchanged."""
        return self.target.is_dir() and is_intact(self.target)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other loaders while the block runs. Raises `OSError`."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as lock:
            # A volume without locks is written by one pod at a time anyway.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def begin(self, version: str) -> None:
        """Keep the files of the same version that an earlier run has fetched; delete all others."""
        if self.target.is_dir():  # damaged, otherwise there would be no fetch
            shutil.rmtree(self.target)
        stamp = self.staging / COMMIT
        if not stamp.is_file() or stamp.read_text() != version:
            self.forget()
            self.staging.mkdir(parents=True)
            stamp.write_text(version)

    def forget(self) -> None:
        """Delete all parts."""
        shutil.rmtree(self.staging, ignore_errors=True)

    def missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Return the disk space still needed; an archive exists beside its members for a moment."""
        archives = sum(file.num_bytes for file in files if file.is_archive)
        return archives + sum(file.num_bytes for file in files) - self.num_bytes(files)

    def num_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Return the bytes of the files that have arrived."""
        return sum(self._num_bytes_of(file) for file in files)

    def part(self, file: RemoteFile) -> PartFile:
        """Return the partial file, open for appending."""
        path = self._part(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > file.num_bytes:
            path.unlink()
        return PartFile(path, file)

    def has(self, file: RemoteFile) -> bool:
        return (self.staging / file.path).is_file()

    def place(self, file: RemoteFile) -> Path:
        """Return the current path of a complete or partial file."""
        return self.staging / file.path if self.has(file) else self._part(file)

    def accept(self, file: RemoteFile, part: PartFile) -> None:
        """Move a part file to its place after checking size and digest.

        Raises `FetchError` for a wrong one, which the next run fetches again.
        """
        num_bytes = part.num_bytes
        if num_bytes != file.num_bytes or not self._is_right(part.hexdigest(), file):
            self._part(file).unlink()
            what = f"{num_bytes} bytes, not {file.num_bytes}" if num_bytes != file.num_bytes else "other content"
            raise FetchError("ModelCorrupt", f"`{file.path}` arrived damaged: {what}. It will be fetched again.")
        part.sync()
        os.replace(self._part(file), self.staging / file.path)

    def unpack(self, file: RemoteFile) -> None:
        """Unpack the model's files from an archive and delete it. Raises `FetchError`."""
        archive = self.staging / file.path
        try:
            unpack(archive, self.staging, _place_of)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError) as error:
            archive.unlink()
            message = f"the layer {archive.name[:12]} cannot be unpacked ({str(error)[:120]}). Push the image again."
            raise FetchError("ModelUnreadable", message) from error
        archive.unlink()

    def publish(self, source: str, version: str) -> None:
        (self.staging / COMMIT).unlink()
        for path in [path for path in self.staging.iterdir() if path.is_dir() and path.name.startswith(".")]:
            shutil.rmtree(path)
        write_record(self.staging, source, version, self._sha256)
        os.replace(self.staging, self.target)
        folder = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _num_bytes_of(self, file: RemoteFile) -> int:
        """Return the bytes of the file that have arrived."""
        for path in (self.staging / file.path, self._part(file)):
            with suppress(OSError):
                return min(file.num_bytes, path.stat().st_size)
        return 0

    def _part(self, file: RemoteFile) -> Path:
        return self.staging / f"{file.path}{PART}"

    def _is_right(self, digest: str, file: RemoteFile) -> bool:
        """Whether the digest that the source publishes, if any, matches."""
        if file.git_sha1 is not None and file.sha256 is None:
            return digest == file.git_sha1
        if not file.is_archive:
            self._sha256[file.path] = digest
        return file.sha256 in (None, digest)


def _place_of(member: tarfile.TarInfo) -> str | None:
    """Return the path in the model's folder of an image layer's member, or None if it is not part of the model."""
    path = PurePosixPath(member.name.removeprefix("./"))
    is_model = any(fnmatch(path.name, pattern) for pattern in [*MODEL_PATTERNS, "*.gguf"])
    if not member.isfile() or not is_model or ".." in path.parts or path.is_absolute():
        return None
    inside = next((str(path).removeprefix(place) for place in _PLACES if str(path).startswith(place)), None)
    return inside if inside is not None else (str(path) if len(path.parts) == 1 else None)

"""The model's folder on its volume: filled beside its final place and moved there in one step once it is complete.

A folder in its final place is complete: later loaders have nothing to do, and engines never see half a model. Loaders
of the same folder wait for each other; one that was killed leaves its part files for the next.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from pagemill_protocol.source_errors import FetchError
from pagemill_protocol.sources.base import RemoteFile
from pagemill_protocol.sources.hugging_face import MODEL_PATTERNS
from pagemill_protocol.sources.store.part import PartFile
from pagemill_protocol.sources.store.record import is_intact, write_record

PART = ".part"
COMMIT = ".commit"
_PLACES = ("models/", "model/")
"""Where images keep a model; beside that only files at the root are taken."""


class ModelFolder:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.staging = target.with_name(f".{target.name}.loading")
        """Where files lie until all are there."""
        self._lock = target.with_name(f".{target.name}.lock")
        self._sha256: dict[str, str] = {}
        """Of files that were read to be checked."""

    @property
    def complete(self) -> bool:
        """It is there, and its files are what they were."""
        return self.target.is_dir() and is_intact(self.target)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other loader works on this folder meanwhile. Raises `OSError`."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as lock:
            # Volumes that know no locks are written by one pod at a time anyway.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def begin(self, version: str) -> None:
        """Keep what an earlier run has fetched of the same version; forget anything else."""
        if self.target.is_dir():  # damaged, else nothing would begin
            shutil.rmtree(self.target)
        stamp = self.staging / COMMIT
        if not stamp.is_file() or stamp.read_text() != version:
            self.forget()
            self.staging.mkdir(parents=True)
            stamp.write_text(version)

    def forget(self) -> None:
        """Drop all parts."""
        shutil.rmtree(self.staging, ignore_errors=True)

    def missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Of the disk, until all is there: an archive lies beside its members for a moment."""
        archives = sum(file.num_bytes for file in files if file.is_archive)
        return archives + sum(file.num_bytes for file in files) - self.num_bytes(files)

    def num_bytes(self, files: Sequence[RemoteFile]) -> int:
        """Bytes of the files that are here."""
        return sum(self._num_bytes_of(file) for file in files)

    def part(self, file: RemoteFile) -> PartFile:
        """The file as far as it is here, open for the rest."""
        path = self._part(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > file.num_bytes:
            path.unlink()
        return PartFile(path, file)

    def has(self, file: RemoteFile) -> bool:
        return (self.staging / file.path).is_file()

    def place(self, file: RemoteFile) -> Path:
        """Where it lies, as far as it is here."""
        return self.staging / file.path if self.has(file) else self._part(file)

    def accept(self, file: RemoteFile, part: PartFile) -> None:
        """The part file is whole and right. Raises `FetchError`; the next run fetches it again then."""
        num_bytes = part.num_bytes
        if num_bytes != file.num_bytes or not self._is_right(part.hexdigest(), file):
            self._part(file).unlink()
            what = f"{num_bytes} bytes, not {file.num_bytes}" if num_bytes != file.num_bytes else "other content"
            raise FetchError("ModelCorrupt", f"`{file.path}` arrived damaged: {what}. It will be fetched again.")
        part.sync()
        os.replace(self._part(file), self.staging / file.path)

    def unpack(self, file: RemoteFile) -> None:
        """Take the model's files out of an archive, which ends with that. Raises `FetchError`."""
        archive = self.staging / file.path
        try:
            with tarfile.open(archive, "r:*") as members:
                for member in members:
                    place = _place_of(member)
                    if place is not None:
                        members.extract(member.replace(name=place, deep=False), self.staging, filter="data")
        except (tarfile.TarError, EOFError) as error:
            archive.unlink()
            message = f"the layer {archive.name[:12]} cannot be unpacked ({error}). Push the image again."
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
        """Bytes of the file that are already here."""
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
    """Where a member of an image's layer belongs in the model's folder; `None`: it is no part of the model."""
    path = PurePosixPath(member.name.removeprefix("./"))
    is_model = any(fnmatch(path.name, pattern) for pattern in [*MODEL_PATTERNS, "*.gguf"])
    if not member.isfile() or not is_model or ".." in path.parts or path.is_absolute():
        return None
    inside = next((str(path).removeprefix(place) for place in _PLACES if str(path).startswith(place)), None)
    return inside if inside is not None else (str(path) if len(path.parts) == 1 else None)

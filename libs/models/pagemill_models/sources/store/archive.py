"""Unpack the model's files from a layer of an image, which its publisher wrote: nothing in it is believed.

A layer of a kilobyte may unpack to a terabyte, and its headers may claim any size: the bytes that are unpacked are
counted, also those of members that are not extracted, and end with an error that names the layer. `folder` keeps the
archive and its members.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

MAX_FACTOR = 16
"""Most bytes of an unpacked layer for each of its own: weights hardly become smaller when they are packed."""
MIN_LIMIT_BYTES = 1024**3
"""What any layer may unpack to."""
MAX_MEMBERS = 100_000
MAX_READ_BYTES = 16 * 1024 * 1024
"""Most bytes of one piece. Members are copied in small ones, but extended headers are read whole."""
_GZIP = b"\x1f\x8b"


class _Counted(io.RawIOBase):
    """An unpacked archive, of which at most `limit_bytes` are read."""

    def __init__(self, unpacked: IO[bytes], limit_bytes: int) -> None:
        self._unpacked = unpacked
        self._limit_bytes = limit_bytes

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        self._check(self._unpacked.tell() + size)
        return self._unpacked.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            self._check(offset)
        return self._unpacked.seek(offset, whence)

    def tell(self) -> int:
        return self._unpacked.tell()

    def _check(self, end: int) -> None:
        # tarfile reads whole blocks, also behind the last member.
        if end > self._limit_bytes + tarfile.RECORDSIZE:
            raise tarfile.ReadError(f"it unpacks to more than {self._limit_bytes} bytes")


def unpack(archive: Path, folder: Path, place_of: Callable[[tarfile.TarInfo], str | None]) -> None:
    """Extract the members with a place in `folder`. Raises `tarfile.TarError`, `EOFError` or `OSError`.

    `place_of`: returns the path of a member in `folder`, or None.
    """
    limit_bytes = max(MIN_LIMIT_BYTES, MAX_FACTOR * archive.stat().st_size)
    with archive.open("rb") as packed:
        is_packed = packed.read(2) == _GZIP
        packed.seek(0)
        unpacked: IO[bytes] = gzip.GzipFile(fileobj=packed) if is_packed else packed  # type: ignore[assignment]
        source = _Counted(unpacked, limit_bytes)
        with tarfile.open(fileobj=source, mode="r:") as members:
            for number, member in enumerate(members):
                if number >= MAX_MEMBERS or member.size > limit_bytes:
                    raise tarfile.ReadError(f"it has more than {MAX_MEMBERS} members, or one of {member.size} bytes")
                members.members = []  # type: ignore[attr-defined]  # tarfile keeps all it has read
                place = place_of(member)
                if place is not None:
                    members.extract(member.replace(name=place, deep=False), folder, filter="data")

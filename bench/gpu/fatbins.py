"""Blanks the machine code that one device never loads, so that a library travels in a fraction of its size.

nvcc embeds a container for each kernel file, with code for many architectures and PTX, from which the driver compiles
the rest. It loads the code that was made for the device's own architecture; without such code it compiles the newest
PTX that is not newer than the device. It reads nothing else of the container but headers and offsets. So zeros replace
all other code: the file keeps its length, and its compressed form shrinks.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of all entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of this header, bytes of the code, and the architecture as 10 * major + minor."""
CODE = 2
"""Kind of an entry with machine code; PTX has 1."""


class Entry(NamedTuple):
    kind: int
    architecture: int
    begin: int
    """Where the code begins, behind the entry's header."""
    end: int


def blank_others(library: bytearray, architecture: int) -> int:
    """Blank all code that a device of this architecture does not load; return the number of blanked bytes."""
    blanked = 0
    for entries in containers(library):
        loaded = _loaded(entries, architecture)
        for entry in entries:
            if entry not in loaded:
                library[entry.begin : entry.end] = bytes(entry.end - entry.begin)
                blanked += entry.end - entry.begin
    return blanked


def _loaded(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return what the device loads. Other code of its generation may be loaded as well, if none is exactly its own."""
    own = [entry for entry in entries if entry.kind == CODE and entry.architecture == architecture]
    if own:
        return own
    older = [entry for entry in entries if entry.architecture <= architecture]
    kin = [entry for entry in older if entry.kind == CODE and entry.architecture // 10 == architecture // 10]
    compiled = [entry for entry in older if entry.kind != CODE]
    newest = max((entry.architecture for entry in compiled), default=0)
    return kin + [entry for entry in compiled if entry.architecture == newest]


def containers(library: bytes | bytearray) -> list[list[Entry]]:
    """Return the entries of each container, in the order of the file."""
    found, at = [], library.find(MAGIC)
    while at >= 0:
        _, version, head_bytes, size = CONTAINER.unpack_from(library, at)
        begin, end = at + head_bytes, at + head_bytes + size
        if version != 1 or head_bytes != CONTAINER.size or end > len(library):
            at = library.find(MAGIC, at + len(MAGIC))  # these four bytes stand elsewhere, too
            continue
        found.append(_entries(library, begin, end))
        at = library.find(MAGIC, end)
    return found


def _entries(library: bytes | bytearray, begin: int, end: int) -> list[Entry]:
    entries, at = [], begin
    while at + ENTRY.size <= end:
        kind, _, head_bytes, size, architecture = ENTRY.unpack_from(library, at)
        entries.append(Entry(kind, architecture, at + head_bytes, min(end, at + head_bytes + size)))
        at += head_bytes + size
    return entries

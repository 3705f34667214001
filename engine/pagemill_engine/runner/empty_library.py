"""Shared libraries that hold nothing but their name: whatever needs a library of that name is content with it.

Made in memory, in the format of ELF (System V ABI, chapters 4 and 5): a header, three segments, the dynamic section
and the tables it must have. Nothing in them is executable. Who uses them, and why: `runner.lean_torch`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

_CLASS_64, _LITTLE_ENDIAN = 2, 1
_SHARED_OBJECT, _VERSION = 3, 1
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READ_WRITE = 6
_ALIGNMENT = 0x10000
_END, _HASH, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_SIZE, _NAME = 0, 4, 5, 6, 10, 11, 14
_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<QQ")
_SYMBOL_BYTES = 24


def load_empty(names: Sequence[str]) -> None:
    """From here on this process has libraries of these names. Raises OSError where the system makes none."""
    machine = _machine()
    with ExitStack() as stack:
        # All are open at a time: the linker knows libraries by their paths, and a number used again is an old path.
        files = [stack.enter_context(open(os.memfd_create(name), "wb", buffering=0)) for name in names]
        for name, file in zip(names, files, strict=True):
            file.write(empty_library(name, machine))
            ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")


def empty_library(name: str, machine: int) -> bytes:
    """`machine`: of the processor, as ELF numbers them."""
    strings = b"\0" + name.encode() + b"\0"
    hashes = struct.pack("<4I", 1, 1, 0, 0)  # one bucket, and in it the symbol that every table begins with
    dynamic_at = _HEADER.size + 3 * _SEGMENT.size
    symbols_at = dynamic_at + 7 * _ENTRY.size
    hashes_at = symbols_at + _SYMBOL_BYTES
    strings_at = hashes_at + len(hashes)
    size = strings_at + len(strings)
    entries = (
        (_NAME, 1),
        (_HASH, hashes_at),
        (_STRINGS, strings_at),
        (_SYMBOLS, symbols_at),
        (_STRINGS_SIZE, len(strings)),
        (_SYMBOL_SIZE, _SYMBOL_BYTES),
        (_END, 0),
    )
    dynamic = b"".join(_ENTRY.pack(*entry) for entry in entries)
    return (
        _header(machine)
        + _segment(_LOAD, 0, size, _ALIGNMENT)
        + _segment(_DYNAMIC, dynamic_at, len(dynamic), 8)
        + _segment(_STACK, 0, 0, 16)
        + dynamic
        + bytes(_SYMBOL_BYTES)
        + hashes
        + strings
    )


def _header(machine: int) -> bytes:
    identity = (b"\x7fELF", _CLASS_64, _LITTLE_ENDIAN, _VERSION, 0, 0)
    sizes = (_HEADER.size, _SEGMENT.size, 3, 0, 0, 0)
    return _HEADER.pack(*identity, _SHARED_OBJECT, machine, _VERSION, 0, _HEADER.size, 0, 0, *sizes)


def _segment(kind: int, at: int, size: int, alignment: int) -> bytes:
    return _SEGMENT.pack(kind, _READ_WRITE, at, at, at, size, size, alignment)


def _machine() -> int:
    """The processor's number, from this program. Raises OSError where libraries are of another kind."""
    with Path("/proc/self/exe").open("rb") as program:
        start = program.read(20)
    if start[:6] != b"\x7fELF" + bytes((_CLASS_64, _LITTLE_ENDIAN)):
        raise OSError("this program is not of 64 bits in little-endian order")
    return int.from_bytes(start[18:20], "little")

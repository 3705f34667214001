"""Values of tensors in the Open Inference Protocol: lists in JSON, or bytes after it.

Binary tensor data is little-endian; each element of type BYTES is preceded by its length in 4 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from pagemill_api.openai.fields import refusal

FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}
"""Formats of `struct` by the protocol's data type."""
MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<I")


def flat(data: Sequence[Any], name: str, depth: int = MAX_DIMENSIONS) -> Iterator[Any]:
    """Yield the elements of a tensor, whose rows may be nested lists. Raises `PydanticCustomError`."""
    if not depth:
        raise refusal(name, f"`{name}` is a list of lists more than {MAX_DIMENSIONS} deep. Send a flat list.")
    for each in data:
        if isinstance(each, list):
            yield from flat(each, name, depth - 1)
        else:
            yield each


def unpacked(raw: bytes, datatype: str, name: str) -> list[Any]:
    """Return the elements of a tensor sent as bytes. Raises `PydanticCustomError`."""
    if datatype == "BYTES":
        return [_text(each, name) for each in _strings(raw, name)]
    layout = struct.Struct("<" + FORMATS[datatype])
    if len(raw) % layout.size:
        raise refusal(
            name, f"`{name}` of {datatype} has {len(raw)} bytes. Send a multiple of {layout.size}, as its shape says."
        )
    return [value for (value,) in layout.iter_unpack(raw)]


def packed(text: str) -> bytes:
    """Return the encoding of one element of type BYTES."""
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw


def _strings(raw: bytes, name: str) -> Iterator[bytes]:
    begin = 0
    while begin < len(raw):
        start = begin + _LENGTH.size
        end = start + _LENGTH.unpack_from(raw, begin)[0] if start <= len(raw) else len(raw) + 1
        if end > len(raw):
            raise refusal(name, f"`{name}` ends within an element. Send 4 bytes of length before each element.")
        yield raw[start:end]
        begin = end


def _text(raw: bytes, name: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise refusal(name, f"`{name}` is not valid UTF-8. Encode the text as UTF-8.") from None
    if "\0" in text:
        raise refusal(name, f"`{name}` contains the character U+0000. Remove it.")
    return text

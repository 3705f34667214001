"""JSON texts in pieces: the large parts of a body are rendered as they come, and are neither joined nor copied.

`JsonRows` keeps the elements of an array as bytes. `JsonPieces` writes a value of which some parts are such pieces; the
same piece may stand in several places, so a prompt that every choice repeats is rendered and kept once. Nothing is
sent here.

`on_one_line` and `OneLine` write JSON that every reader of lines takes for one line: JSON allows U+2028, U+2029 and
U+0085 within strings, and readers such as `httpx.iter_lines` and Python's `splitlines` end a line there. Other control
characters are always escaped in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

PIECE_BYTES = 64 * 1024
"""Size above which the next rows begin a new piece."""
_MARK = b"\0"
"""Encloses the number of a part that is filled in. JSON escapes this byte, so no text contains it."""

_SEPARATORS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u2028\u2029\u0085")
_BEGINNINGS = tuple(raw[:length] for raw, _ in _SEPARATORS for length in range(len(raw) - 1, 0, -1))


class JsonRows:
    """The elements of an array, rendered one after the other, without objects that the garbage collector visits."""

    __slots__ = ("_open", "_pieces", "num_bytes")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._open = bytearray()
        self.num_bytes = 0

    def add(self, row: bytes) -> None:
        """Add an element, as JSON."""
        if self.num_bytes:
            self._open += b","
        self._open += row
        self.num_bytes += len(row) + 1
        if len(self._open) >= PIECE_BYTES:
            self._close_piece()

    @property
    def pieces(self) -> list[bytes]:
        """The elements so far, with commas between them: the same pieces each time."""
        if self._open:
            self._close_piece()
        return self._pieces

    def _close_piece(self) -> None:
        self._pieces.append(bytes(self._open))
        self._open = bytearray()


def array_pieces(*parts: JsonRows | None) -> list[bytes]:
    """Return the pieces of one array that has the elements of all parts."""
    pieces = [b"["]
    for part in parts:
        if part is not None and part.num_bytes:
            if len(pieces) > 1:
                pieces.append(b",")
            pieces += part.pieces
    pieces.append(b"]")
    return pieces


def joined_array(*parts: JsonRows | None) -> orjson.Fragment:
    """Return such an array as one part of a value that `orjson` writes."""
    return orjson.Fragment(b"".join(array_pieces(*parts)))


class JsonPieces:
    """Writes one value. `part` returns what stands in the value for pieces that are rendered already."""

    def __init__(self) -> None:
        self._parts: list[Sequence[bytes]] = []

    def part(self, pieces: Sequence[bytes]) -> orjson.Fragment:
        self._parts.append(pieces)
        return orjson.Fragment(b"%b%d%b" % (_MARK, len(self._parts) - 1, _MARK))

    def text(self, text: str, before: Sequence[bytes] = ()) -> orjson.Fragment:
        """Return the part for a string. `before`: the string's beginning, as `string_pieces` has rendered it."""
        return self.part([b'"', *before, orjson.dumps(text)[1:]])

    def write(self, value: Any) -> list[bytes]:
        """Return the pieces of the JSON text of `value`."""
        pieces: list[bytes] = []
        for place, written in enumerate(orjson.dumps(value).split(_MARK)):
            if place % 2:
                pieces += self._parts[int(written)]
            else:
                pieces.append(written)
        return pieces


def string_pieces(text: str) -> list[bytes]:
    """Return the content of a JSON string, for several strings that begin with it."""
    return [orjson.dumps(text)[1:-1]] if text else []


def pieces_of(body: bytes | Iterable[bytes]) -> Iterable[bytes]:
    """Return the pieces of a body, which may be a single one."""
    return (body,) if isinstance(body, bytes) else body


def in_blocks(pieces: Iterable[bytes], block_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the same bytes in blocks: small pieces are joined, large ones divided."""
    block = bytearray()
    for piece in pieces:
        if len(block) + len(piece) < block_bytes:
            block += piece
            continue
        view = memoryview(piece)
        start = block_bytes - len(block)
        yield bytes(block + view[:start])
        while len(view) - start >= block_bytes:
            yield bytes(view[start : start + block_bytes])
            start += block_bytes
        block = bytearray(view[start:])
    if block:
        yield bytes(block)


def on_one_line(data: bytes) -> bytes:
    """Return JSON in UTF-8 with all line separators escaped."""
    if data.isascii():
        return data
    for raw, escaped in _SEPARATORS:
        data = data.replace(raw, escaped)
    return data


class OneLine:
    """Escapes JSON that arrives in pieces, which may divide a character."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> bytes:
        data = self._held + data
        self._held = next((each for each in _BEGINNINGS if data.endswith(each)), b"")
        return on_one_line(data[: len(data) - len(self._held)])

    def flush(self) -> bytes:
        """Return what was held back at the end of the text."""
        held, self._held = self._held, b""
        return held

"""Reads the lines of a file in pieces, and checks each line of an input file without building its values.

A line is checked where it stands and forgotten: what is kept of it is its place in the file (`input_file` reads it
again when it runs), so that a file of large lines takes no more memory than its largest one.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec

from pagemill_gateway.batches.objects import LineFault
from pagemill_protocol import nesting
from pagemill_protocol.errors import show

PIECE_BYTES = 64 * 1024
MAX_CUSTOM_ID_CHARS = 512
MAX_TEXT_BYTES = 12 * MAX_CUSTOM_ID_CHARS + 2
"""The longest JSON text of a `custom_id`: twelve bytes for each character that is escaped as a pair."""
Read = Callable[[int, int], Awaitable[bytes]]
"""Reads content from an offset, up to a number of bytes; returns nothing at the end."""
_NULL = msgspec.Raw(b"null")


class ScannedLine(NamedTuple):
    number: int
    """The line's number from 1; empty lines count."""
    offset: int
    num_bytes: int
    beginning: bytes
    """The line up to the number of bytes that the reader wanted to keep."""


class Line(NamedTuple):
    number: int
    custom_id: str
    model: str
    offset: int
    num_bytes: int


class BrokenLine(NamedTuple):
    number: int
    custom_id: str | None
    fault: LineFault


class _Fields(msgspec.Struct):
    custom_id: msgspec.Raw = _NULL
    method: msgspec.Raw = msgspec.Raw(b'"POST"')
    url: msgspec.Raw = _NULL
    body: msgspec.Raw = _NULL


class _Request(msgspec.Struct):
    model: msgspec.Raw = _NULL
    stream: msgspec.Raw = _NULL


_fields = msgspec.json.Decoder(_Fields)
_request = msgspec.json.Decoder(_Request)
_string = msgspec.json.Decoder(str)


async def scan_lines(read: Read, keep_bytes: int) -> AsyncIterator[ScannedLine]:
    """Yield the lines of a file that are not blank, each with its first `keep_bytes`."""
    offset, number, begin, num_bytes, parts = 0, 0, 0, 0, list[bytes]()
    while piece := await read(offset, PIECE_BYTES):
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            number += 1
            parts.append(piece[start : min(end, start + max(0, keep_bytes - num_bytes))])
            line = ScannedLine(number, begin, num_bytes + end - start, b"".join(parts))
            start = end + 1
            begin, num_bytes, parts = offset + start, 0, []
            if line.beginning.strip() or line.num_bytes > keep_bytes:
                yield line
        parts.append(piece[start : start + max(0, keep_bytes - num_bytes)])
        num_bytes += len(piece) - start
        offset += len(piece)
    line = ScannedLine(number + 1, begin, num_bytes, b"".join(parts))
    if line.beginning.strip() or line.num_bytes > keep_bytes:
        yield line


class LineChecker:
    """Checks the lines of one file in order."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._custom_ids: set[bytes] = set()
        """Digests, because 50,000 ids of 512 characters would take 25 MB."""

    def check(self, line: ScannedLine) -> Line | BrokenLine:
        """Return the line, or its fault. `line` was scanned with the limit of bytes."""
        number = line.number
        if line.num_bytes > self._max_bytes:
            return _broken(number, None, "line_too_long", f"The line is longer than {self._max_bytes} bytes.")
        try:
            given = _fields.decode(line.beginning)
        except msgspec.ValidationError:
            return _broken(number, None, "invalid_json_line", "The line is no JSON object.")
        except msgspec.DecodeError as error:
            return _broken(number, None, "invalid_json_line", f"The line is not valid JSON: {error}.")
        except RecursionError:
            return _nested(number, None, nesting.path_in_text(line.beginning))
        custom_id = _text(given.custom_id)
        if not custom_id or len(custom_id) > MAX_CUSTOM_ID_CHARS:
            known = f"a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            return _broken(number, None, "invalid_custom_id", f"`custom_id` must be {known}.")
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        if digest in self._custom_ids:
            message = f"An earlier line has the `custom_id` {show(custom_id)} too."
            return _broken(number, custom_id, "duplicate_custom_id", message)
        # Deeper values behind the text that this searches are refused by the route, with the same code.
        if nesting.may_exceed(bytes(given.body)) and (path := nesting.path_in_text(bytes(given.body))):
            return _nested(number, custom_id, f"body.{path}")
        model = self._model(given)
        if isinstance(model, LineFault):
            return BrokenLine(number, custom_id, msgspec.structs.replace(model, line=number))
        self._custom_ids.add(digest)
        return Line(number, custom_id, model, line.offset, line.num_bytes)

    def _model(self, given: _Fields) -> str | LineFault:
        """Return the name of the model, which may be missing or wrong, or the fault of the request."""
        if _text(given.method) != "POST":
            return LineFault("invalid_method", "`method` must be POST.")
        if _text(given.url) != self._endpoint:
            return LineFault("invalid_url", f"`url` must be the batch's endpoint, {self._endpoint}.")
        try:
            request = _request.decode(given.body)
        except (msgspec.DecodeError, RecursionError):
            return LineFault("invalid_body", "`body` must be an object: the request.")
        if bytes(request.stream) not in (b"null", b"false"):
            return LineFault("invalid_body", "A line of a batch cannot be streamed. Remove `stream`.")
        return _text(request.model) or ""


def body_of(text: bytes, custom_id: str) -> bytes | None:
    """Return the request of a line that was checked before; `None` if it is another line now."""
    try:
        given = _fields.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return bytes(given.body) if _text(given.custom_id) == custom_id else None


def _text(raw: msgspec.Raw) -> str | None:
    """Return the value if it is a string of a length that may be right."""
    if len(bytes(raw)) > MAX_TEXT_BYTES:
        return None
    try:
        return _string.decode(raw)
    except msgspec.DecodeError:
        return None


def _nested(number: int, custom_id: str | None, path: str) -> BrokenLine:
    error = nesting.nested_too_deeply(path)
    return _broken(number, custom_id, nesting.CODE, error.message.replace("The request body", "The line"))


def _broken(number: int, custom_id: str | None, code: str, message: str) -> BrokenLine:
    return BrokenLine(number, custom_id, LineFault(code, message, number))

"""Compression: request bodies in gzip, deflate or zstd, and whole answers for clients that accept gzip.

`request_middleware` calls it. The decompressed size is bounded while the body is read, so a small body cannot become
large; streams are never compressed, since their events would wait for each other.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import zlib
from typing import Protocol

from starlette.types import Message, Scope

from pagemill_protocol.errors import PagemillError, body_too_large, invalid_field
from pagemill_servers.auth import header

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIN_COMPRESSED_BYTES = 4096
"""Below it, compression costs more time than it saves."""
MAX_INLINE_BYTES = 256 * 1024
"""A larger answer is compressed in a thread, so that the event loop is not blocked."""
LEVEL = 1
_GZIP_FORMAT = 31
_FORMATS = {"gzip": _GZIP_FORMAT, "deflate": zlib.MAX_WBITS}
_ZSTD_WINDOW_LOG = 23
"""A body in zstd whose window is larger than 8 MiB is refused: its sender decides how much memory the window takes. RFC
8878 recommends to support this one, and compressors choose larger ones only where a setting asks for them."""
MAX_MEMBERS = 256
"""Most gzip members or zstd frames of a body, each of which costs time of its own."""
_COMPRESSIBLE = (b"application/json", b"text/html", b"text/plain")


class _Stream(Protocol):
    """A decompressor of the standard library."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _stream(coding: str) -> _Stream:
    if coding != "zstd":
        return zlib.decompressobj(wbits=_FORMATS[coding])
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})


class Inflater:
    """Decompresses one request body: one or several gzip members or zstd frames, or a deflate stream, with or without
    zlib's head."""

    def __init__(self, max_bytes: int, coding: str) -> None:
        """`coding`: `gzip`, `deflate` or `zstd`."""
        self._max_bytes = max_bytes
        self._coding = coding
        self._num_bytes = self._num_members = 0
        self._stream = _stream(coding)
        self._has_begun = False

    def push(self, data: bytes, *, last: bool) -> bytes:
        """Return the decompressed bytes of `data`.

        Raises `PagemillError`: 413 beyond the bound, 400 if the body is not of its coding.
        """
        if data and not self._has_begun:
            self._begin(data[0])
        text, rest = (b"", data) if self._stream.eof else (self._decompress(data), self._stream.unused_data)
        while rest:
            self._num_members += 1
            if self._coding == "deflate" or self._num_members == MAX_MEMBERS:
                raise self._wrong()
            self._stream = _stream(self._coding)
            text += self._decompress(rest)
            rest = self._stream.unused_data
        if last and not self._stream.eof:
            raise self._wrong()
        return text

    def _begin(self, first: int) -> None:
        self._has_begun = True
        if self._coding == "deflate" and first & 0x0F != zlib.DEFLATED:  # as some clients send it, without a head
            self._stream = zlib.decompressobj(wbits=-zlib.MAX_WBITS)

    def _decompress(self, data: bytes) -> bytes:
        try:
            text = self._stream.decompress(data, self._max_bytes - self._num_bytes + 1)
        except (zlib.error, zstd.ZstdError):
            raise self._wrong() from None
        self._num_bytes += len(text)
        if self._num_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)
        return text

    def _wrong(self) -> PagemillError:
        return invalid_field(
            "content-encoding",
            f"The body is not in the coding {self._coding} that its header Content-Encoding announces.",
        )


class Deflater:
    """Compresses an answer whose body is sent in parts, with little memory, since many may be sent at once."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP_FORMAT - 3, 5)

    def start(self, message: Message) -> Message:
        """Return the start message of the compressed answer, whose length is not known yet."""
        headers = [(name, value) for name, value in message["headers"] if name.lower() != b"content-length"]
        return {**message, "headers": [*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]}

    def part(self, message: Message) -> Message:
        """Return a part of the body in gzip."""
        data = self._stream.compress(message.get("body", b""))
        if not message.get("more_body", False):
            data += self._stream.flush()
        return {**message, "body": data}


def inflater_of(scope: Scope, max_bytes: int) -> Inflater | None:
    """Return a decompressor for the body, or None if it is not compressed. Raises `PagemillError` 415 for other
    codings."""
    coding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if coding in ("identity", ""):
        return None
    if coding in ("gzip", "x-gzip", "deflate", "zstd"):
        return Inflater(max_bytes, coding.removeprefix("x-"))
    raise PagemillError(
        f"The body has the Content-Encoding {coding[:40]!r}. Send it as gzip, deflate or zstd, or without a coding.",
        status=415,
        param="content-encoding",
        code="unsupported_media_type",
    )


def accepts_gzip(scope: Scope) -> bool:
    for part in (header(scope, b"accept-encoding") or "").lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def is_compressible(start: Message) -> bool:
    """Whether an answer with this start message is complete, textual and large enough."""
    headers = dict(start.get("headers", ()))
    length = headers.get(b"content-length", b"0")
    is_text = headers.get(b"content-type", b"").startswith(_COMPRESSIBLE)
    return is_text and length.isdigit() and int(length) >= MIN_COMPRESSED_BYTES and b"content-encoding" not in headers


async def compressed(start: Message, body: Message) -> tuple[Message, Message]:
    """Return the answer in gzip."""
    data: bytes = body.get("body", b"")
    if len(data) > MAX_INLINE_BYTES:
        packed = await asyncio.to_thread(gzip.compress, data, LEVEL, mtime=0)
    else:
        packed = gzip.compress(data, LEVEL, mtime=0)
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"), (b"content-length", b"%d" % len(packed))]
    return {**start, "headers": headers}, {**body, "body": packed}

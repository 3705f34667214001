"""The link: one connection between a gateway process and an engine that carries all requests and their answers.

It begins as an HTTP request for `LINK_PATH` that offers the protocol `LINK_PROTOCOL`; after the 101 both sides send
records, `u32 length | u32 stream | u8 kind | data`, little-endian. A stream is one request; the gateway numbers them.
The data of an answer are frames (`frames`), split at any byte, so that a large frame does not delay other streams. An
engine sends at most `WINDOW_BYTES` of a stream beyond what its gateway has credited, so a slow client stops only its
own stream. While the rest of an answer waits for credit, the engine says that it has computed the request (`FREED`).

An engine that refuses the link answers with an HTTP status and the body of an error. `generate` defines requests and
frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from pagemill_protocol.frames import FrameError

LINK_PATH = "/internal/link"
LINK_PROTOCOL = "pagemill-link/1"
"""Value of the header Upgrade in request and answer."""

FREED_HEADER = "x-pagemill-freed"
"""Header of a gateway that understands `RecordKind.FREED`; earlier releases do not."""

PIECE_BYTES = 64 * 1024
"""Maximum data bytes of one record of a request or an answer."""
MAX_RECORD_BYTES = 128 * 1024
WINDOW_BYTES = 256 * 1024
"""Maximum bytes of a stream's answer that were sent and not yet credited."""
CREDIT_BYTES = WINDOW_BYTES // 2
"""A gateway grants credit as soon as it has taken this many bytes."""

_HEADER = struct.Struct("<IIB")
_COUNT = struct.Struct("<I")


class RecordKind(IntEnum):
    REQUEST_PART = 1
    """From the gateway: a part of a `GenerateRequest`; the rest follows."""
    REQUEST = 2
    """From the gateway: the end of a `GenerateRequest`, or all of it."""
    CANCEL = 3
    """From the gateway: the answer is no longer read."""
    CREDIT = 4
    """From the gateway: number of bytes of the answer that it has taken."""
    ACCEPTED = 5
    """From the engine: the request is accepted; the data are the digest of the engine's weights."""
    REFUSED = 6
    """From the engine: a `Refusal`; the stream is over."""
    DATA = 7
    """From the engine: bytes of frames."""
    END = 8
    """From the engine: the answer is complete; the stream is over."""
    REQUEST_ID = 9
    """From the gateway, right before `REQUEST`: the client's id of the request, for the engine's log."""
    ALLOWANCE = 10
    """From the gateway: a larger token allowance for the request, as a number."""
    FREED = 11
    """From the engine: the request is computed and occupies nothing that the next one needs; its answer goes on."""


class Refusal(msgspec.Struct, frozen=True):
    """The HTTP answer that the engine would have given."""

    status: int
    body: bytes
    retry_after: str | None = None


Record = tuple[int, int, bytes]
"""Kind, stream, data."""


def encode_record(kind: RecordKind, stream: int, data: bytes = b"") -> bytes:
    return _HEADER.pack(len(data), stream, kind) + data


def encode_pieces(kind: RecordKind, stream: int, data: bytes) -> Iterator[bytes]:
    """Yield records of `data` in pieces of at most `PIECE_BYTES`."""
    for start in range(0, len(data), PIECE_BYTES):
        yield encode_record(kind, stream, data[start : start + PIECE_BYTES])


def encode_number(kind: RecordKind, stream: int, number: int) -> bytes:
    """Return a record of credited bytes or of an allowance."""
    return encode_record(kind, stream, _COUNT.pack(number))


def decode_number(data: bytes) -> int:
    """Return the number in a record of `encode_number`. Raises `FrameError`."""
    if len(data) != _COUNT.size:
        raise FrameError(f"A number has {len(data)} bytes.")
    (number,) = _COUNT.unpack(data)
    return int(number)


class RecordDecoder:
    """Splits the bytes of a link into records; one per connection and direction."""

    def __init__(self) -> None:
        self._rest = b""
        """Beginning of an incomplete record: less than `MAX_RECORD_BYTES` and a header."""

    def feed(self, data: bytes) -> list[Record]:
        """Return the records that `data` completes. Raises `FrameError` on garbage; the link cannot be read any
        further."""
        if self._rest:
            data = self._rest + data
        records: list[Record] = []
        start, end, header_bytes = 0, len(data), _HEADER.size
        while end - start >= header_bytes:
            num_bytes, stream, kind = _HEADER.unpack_from(data, start)
            data_at = start + header_bytes
            if data_at + num_bytes > end:
                if num_bytes > MAX_RECORD_BYTES:
                    raise FrameError(f"A record announces {num_bytes} bytes; at most {MAX_RECORD_BYTES} are allowed.")
                break
            start = data_at + num_bytes
            records.append((kind, stream, data[data_at:start]))
        self._rest = data[start:]
        return records

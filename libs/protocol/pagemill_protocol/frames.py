"""Length-prefixed frames: answers on a link, the engine's state stream, the gateway's load stream, and
other messages between processes as `u32 length | msgpack`.

An answer frame is `u32 meta length | u32 payload length | meta (msgpack of FrameMeta) | payload`, a state frame is `u32
length | msgpack of StateFrame`, a load frame `u32 length | msgpack of LoadFrame`; integers are little-endian. The
payload is opaque: bytes for the client that a gateway forwards unparsed. Unknown keys of a newer peer's meta are
ignored, missing ones take their defaults.

Decoders take bytes in any chunking. They refuse lengths above fixed bounds before buffering anything, so a peer that
speaks another protocol fails at once instead of filling memory. The fields are defined in `generate`, `state` and
`load`.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from pagemill_protocol.report.load import LoadFrame
from pagemill_protocol.report.state import StateFrame
from pagemill_protocol.request.generate import FrameMeta

STATE_CONTENT_TYPE = "application/vnd.pagemill.state"
"""Content type of `/internal/state` streams."""
LOAD_CONTENT_TYPE = "application/vnd.pagemill.load"
"""Content type of a gateway's `/internal/load` streams."""
MSGPACK_CONTENT_TYPE = "application/vnd.msgpack"
"""Content type of a tokenizer bundle."""


MAX_META_BYTES = 4 * 1024 * 1024
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
"""Enough for an answer of 128 choices with log probabilities that is not streamed."""
MAX_WHOLE_BYTES = 64 * 1024
"""A larger payload is returned in parts by a decoder that splits."""
MAX_STATE_BYTES = 64 * 1024 * 1024
"""Enough for a snapshot of three million prefix chunks."""
MAX_LOAD_BYTES = 16 * 1024 * 1024
"""Enough for thousands of deployments of one gateway."""

_FRAME_HEADER = struct.Struct("<II")
_MESSAGE_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(FrameMeta)
_state_decoder = msgspec.msgpack.Decoder(StateFrame)
_load_decoder = msgspec.msgpack.Decoder(LoadFrame)

Message = TypeVar("Message")


class FrameError(Exception):
    """The bytes are not frames. The rest of the stream cannot be read; close it."""


class PartMeta(FrameMeta, frozen=True, kw_only=True, omit_defaults=True):
    """The meta of one part of a large payload. Only that of the last part has the fields of the frame."""

    num_payload_bytes: int
    """Bytes of all parts."""
    is_first: bool
    is_end: bool
    closes: bool
    """Whether the payload is that of the answer's last frame."""


class _OpenPayload:
    """A large payload of which only a part has been returned."""

    def __init__(self, meta: FrameMeta, num_bytes: int) -> None:
        self._meta = meta
        self._num_bytes = num_bytes
        self.num_left = num_bytes

    def part(self, num_bytes: int) -> PartMeta:
        """Return the meta of the next part."""
        is_first = self.num_left == self._num_bytes
        self.num_left -= num_bytes
        is_end = not self.num_left
        fields = msgspec.structs.asdict(self._meta) if is_end else {"choice": self._meta.choice}
        return PartMeta(
            **fields,
            num_payload_bytes=self._num_bytes,
            is_first=is_first,
            is_end=is_end,
            closes=self._meta.last,
        )


def encode_frame(meta: FrameMeta, payload: bytes = b"", num_payload_bytes: int | None = None) -> bytes:
    """Encode one answer frame. Raises `FrameError` when meta or payload exceeds its bound.

    `num_payload_bytes`: bytes of the whole payload, of which `payload` is only the beginning; the rest follows.
    """
    num_bytes = len(payload) if num_payload_bytes is None else num_payload_bytes
    encoded = _encoder.encode(meta)
    _check_size("meta", len(encoded), MAX_META_BYTES)
    _check_size("payload", num_bytes, MAX_PAYLOAD_BYTES)
    return b"".join((_FRAME_HEADER.pack(len(encoded), num_bytes), encoded, payload))


def encode_state(state: StateFrame) -> bytes:
    """Encode one state frame. Raises `FrameError` when it exceeds `MAX_STATE_BYTES`."""
    return encode_message("state", state, MAX_STATE_BYTES)


def encode_load(load: LoadFrame) -> bytes:
    """Encode one load frame. Raises `FrameError` when it exceeds `MAX_LOAD_BYTES`."""
    return encode_message("load", load, MAX_LOAD_BYTES)


def encode_message(what: str, message: object, limit: int) -> bytes:
    """Encode a message as `u32 length | msgpack`. Raises `FrameError` when it exceeds `limit` bytes."""
    encoded = _encoder.encode(message)
    _check_size(what, len(encoded), limit)
    return _MESSAGE_HEADER.pack(len(encoded)) + encoded


class _Buffer:
    """Bytes received and not yet consumed. Amortized O(1) per byte in any chunking."""

    __slots__ = ("_data", "_start")

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = 0

    def __len__(self) -> int:
        return len(self._data) - self._start

    def append(self, data: bytes | memoryview) -> None:
        if self._start == len(self._data):
            self._data = bytearray(data)
            self._start = 0
            return
        if self._start > 65536 and self._start * 2 > len(self._data):
            del self._data[: self._start]
            self._start = 0
        self._data += data

    def header(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack_from(self._data, self._start)

    def skip(self, size: int) -> None:
        self._start += size

    def peek(self, start: int, size: int) -> bytes:
        return bytes(memoryview(self._data)[self._start + start : self._start + start + size])

    def take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._data)[self._start : self._start + size])
        self._start += size
        return taken


class FrameDecoder:
    """Splits an answer stream into `(meta, payload)`; one per response.

    With `splits`, a payload above `MAX_WHOLE_BYTES` is returned in parts as it arrives, each with a `PartMeta`, except
    that of an error.
    """

    def __init__(self, *, splits: bool = False) -> None:
        self._buffer = _Buffer()
        self._splits = splits
        self._open: _OpenPayload | None = None
        self._has_rest = self._failed = False

    def feed(self, data: bytes) -> list[tuple[FrameMeta, bytes]]:
        """Return the frames that `data` completes. Raises `FrameError` on garbage, now and on every later call.

        Engines usually write whole frames, which are decoded without the buffer.
        """
        if self._failed or self._has_rest:
            return self._feed_buffer(data)
        frames: list[tuple[FrameMeta, bytes]] = []
        start, end, header_bytes = 0, len(data), _FRAME_HEADER.size
        try:
            while end - start >= header_bytes:
                meta_bytes, payload_bytes = _FRAME_HEADER.unpack_from(data, start)
                meta_at = start + header_bytes
                payload_at = meta_at + meta_bytes
                if meta_bytes > MAX_META_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                    _check_frame(meta_bytes, payload_bytes)
                if payload_at + payload_bytes > end:
                    break
                meta = _meta_decoder.decode(data[meta_at:payload_at])
                start = payload_at + payload_bytes
                frames.append((meta, data[payload_at:start]))
        except FrameError:
            self._failed = True
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._failed = True
            raise _no_meta(error) from error
        if start < end:
            frames += self._feed_buffer(memoryview(data)[start:])
        return frames

    def close(self) -> None:
        """End the stream. Raises `FrameError` if it ends inside a frame."""
        _check_empty(self._buffer)
        if self._open is not None:
            raise FrameError(f"The stream ended inside a frame, {self._open.num_left} bytes of it had not arrived.")

    def _feed_buffer(self, data: bytes | memoryview) -> list[tuple[FrameMeta, bytes]]:
        _refuse_failed(self._failed)
        frames: list[tuple[FrameMeta, bytes]] = []
        self._buffer.append(data)
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except FrameError:
            self._failed = True
            raise
        self._has_rest = len(self._buffer) > 0 or self._open is not None
        return frames

    def _next(self) -> tuple[FrameMeta, bytes] | None:
        buffer = self._buffer
        if self._open is not None:
            return self._next_part(self._open)
        if len(buffer) < _FRAME_HEADER.size:
            return None
        meta_bytes, payload_bytes = buffer.header(_FRAME_HEADER)
        _check_frame(meta_bytes, payload_bytes)
        payload_at = _FRAME_HEADER.size + meta_bytes
        if len(buffer) < payload_at + payload_bytes:
            if not self._splits or payload_bytes <= MAX_WHOLE_BYTES or len(buffer) < payload_at:
                return None
            meta = _decode_meta(buffer.peek(_FRAME_HEADER.size, meta_bytes))
            if meta.error is not None:
                return None
            buffer.skip(payload_at)
            self._open = _OpenPayload(meta, payload_bytes)
            return self._next_part(self._open)
        buffer.skip(_FRAME_HEADER.size)
        meta = _decode_meta(buffer.take(meta_bytes))
        return meta, buffer.take(payload_bytes)

    def _next_part(self, payload: _OpenPayload) -> tuple[FrameMeta, bytes] | None:
        num_bytes = min(len(self._buffer), payload.num_left)
        if not num_bytes:
            return None
        meta = payload.part(num_bytes)
        if meta.is_end:
            self._open = None
        return meta, self._buffer.take(num_bytes)


class MessageDecoder(Generic[Message]):
    """Splits a stream of `u32 length | msgpack` into messages; one per connection."""

    def __init__(self, what: str, decoder: msgspec.msgpack.Decoder[Message], limit: int) -> None:
        self._what = what
        self._decoder = decoder
        self._limit = limit
        self._buffer = _Buffer()
        self._has_rest = self._failed = False

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes. Raises `FrameError` on garbage, now and on every later call.

        Peers usually write whole messages, which are decoded without the buffer.
        """
        if self._failed or self._has_rest:
            return self._feed_buffer(data)
        messages: list[Message] = []
        start, end, header_bytes = 0, len(data), _MESSAGE_HEADER.size
        try:
            while end - start >= header_bytes:
                (size,) = _MESSAGE_HEADER.unpack_from(data, start)
                message_at = start + header_bytes
                if size > self._limit:
                    _check_size(self._what, size, self._limit)
                if message_at + size > end:
                    break
                start = message_at + size
                messages.append(self._decoder.decode(data[message_at:start]))
        except FrameError:
            self._failed = True
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._failed = True
            raise self._unreadable(error) from error
        if start < end:
            self._buffer.append(memoryview(data)[start:])
            self._has_rest = True
        return messages

    def close(self) -> None:
        """End the stream. Raises `FrameError` if it ends inside a frame."""
        _check_empty(self._buffer)

    def _feed_buffer(self, data: bytes) -> list[Message]:
        _refuse_failed(self._failed)
        messages: list[Message] = []
        self._buffer.append(data)
        try:
            while (message := self._next()) is not None:
                messages.append(message)
        except FrameError:
            self._failed = True
            raise
        self._has_rest = len(self._buffer) > 0
        return messages

    def _next(self) -> Message | None:
        buffer = self._buffer
        if len(buffer) < _MESSAGE_HEADER.size:
            return None
        (size,) = buffer.header(_MESSAGE_HEADER)
        _check_size(self._what, size, self._limit)
        if len(buffer) < _MESSAGE_HEADER.size + size:
            return None
        buffer.skip(_MESSAGE_HEADER.size)
        try:
            return self._decoder.decode(buffer.take(size))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> FrameError:
        return FrameError(f"A {self._what} frame cannot be read: {error}")


class StateDecoder(MessageDecoder[StateFrame]):
    """Splits a state stream into `StateFrame`s; one per connection."""

    def __init__(self) -> None:
        super().__init__("state", _state_decoder, MAX_STATE_BYTES)


class LoadDecoder(MessageDecoder[LoadFrame]):
    """Splits a load stream into `LoadFrame`s; one per connection."""

    def __init__(self) -> None:
        super().__init__("load", _load_decoder, MAX_LOAD_BYTES)


def _decode_meta(data: bytes) -> FrameMeta:
    try:
        return _meta_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_meta(error) from error


def _no_meta(error: Exception) -> FrameError:
    return FrameError(f"A frame's meta is not a FrameMeta: {error}")


def _check_frame(meta_bytes: int, payload_bytes: int) -> None:
    if meta_bytes > MAX_META_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        _check_size("meta", meta_bytes, MAX_META_BYTES)
        _check_size("payload", payload_bytes, MAX_PAYLOAD_BYTES)


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise FrameError(f"A frame announces {size} bytes of {what}; at most {limit} are allowed.")


def _check_empty(buffer: _Buffer) -> None:
    if len(buffer):
        raise FrameError(f"The stream ended inside a frame, {len(buffer)} bytes of it had arrived.")


def _refuse_failed(failed: bool) -> None:
    if failed:
        raise FrameError("The stream was broken before; its rest cannot be read.")

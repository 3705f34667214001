"""Frames: any chunking gives the same frames; garbage is refused early, and the stream stays refused."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol import frames
from pagemill_protocol.report.state import EngineLoad, StateFrame
from pagemill_protocol.request.generate import FrameMeta, Usage

metas = st.builds(
    FrameMeta,
    choice=st.integers(0, 127),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=8),
    num_text_chars=st.integers(0, 10**6),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    usage=st.none() | st.builds(Usage, prompt_tokens=st.integers(0, 99), completion_tokens=st.integers(0, 99)),
    last=st.booleans(),
    error=st.none() | st.text(max_size=20),
)
states = st.builds(
    StateFrame,
    sequence=st.integers(0, 10**9),
    snapshot=st.booleans(),
    load=st.builds(EngineLoad, num_kv_bytes_total=st.integers(0, 10**6)),
    prefixes_added=st.lists(st.binary(min_size=16, max_size=16), max_size=5),
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return [*pieces, data[start:]]


@given(st.lists(st.tuples(metas, st.binary(max_size=300)), max_size=6), st.lists(st.integers(0, 60), max_size=60))
def test_any_chunking_gives_the_same_frames(sent: list[tuple[FrameMeta, bytes]], sizes: list[int]) -> None:
    stream = b"".join(frames.encode_frame(meta, payload) for meta, payload in sent)
    decoder = frames.FrameDecoder()
    received = [frame for piece in cut(stream, sizes) for frame in decoder.feed(piece)]
    decoder.close()
    assert received == sent


@given(st.lists(states, max_size=5), st.lists(st.integers(0, 40), max_size=40))
def test_any_chunking_gives_the_same_states(sent: list[StateFrame], sizes: list[int]) -> None:
    stream = b"".join(frames.encode_state(state) for state in sent)
    decoder = frames.StateDecoder()
    received = [state for piece in cut(stream, sizes) for state in decoder.feed(piece)]
    decoder.close()
    assert received == sent


@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error_or_incomplete_and_nothing_else(garbage: bytes) -> None:
    for decoder in (frames.FrameDecoder(), frames.StateDecoder()):
        try:
            decoder.feed(garbage)
            decoder.close()
        except frames.FrameError:
            continue


def test_frames_may_arrive_one_byte_at_a_time() -> None:
    stream = frames.encode_frame(FrameMeta(choice=3), b"data: {}\n\n")
    decoder = frames.FrameDecoder()
    for index in range(len(stream) - 1):
        assert decoder.feed(stream[index : index + 1]) == []
    assert decoder.feed(stream[-1:]) == [(FrameMeta(choice=3), b"data: {}\n\n")]


def test_a_peer_that_speaks_http_is_refused_at_its_first_bytes() -> None:
    with pytest.raises(frames.FrameError, match="announces"):
        frames.FrameDecoder().feed(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "header", [struct.pack("<II", frames.MAX_META_BYTES + 1, 0), struct.pack("<II", 1, frames.MAX_PAYLOAD_BYTES + 1)]
)
def test_announced_sizes_are_bounded_before_anything_is_buffered(header: bytes) -> None:
    with pytest.raises(frames.FrameError, match="at most"):
        frames.FrameDecoder().feed(header)


def test_meta_of_the_wrong_type_is_refused() -> None:
    meta = msgspec.msgpack.encode({"choice": "three"})
    with pytest.raises(frames.FrameError, match="FrameMeta"):
        frames.FrameDecoder().feed(struct.pack("<II", len(meta), 0) + meta)


def test_a_broken_stream_stays_broken() -> None:
    decoder = frames.FrameDecoder()
    with pytest.raises(frames.FrameError):
        decoder.feed(b"\xff" * 8)
    with pytest.raises(frames.FrameError, match="broken before"):
        decoder.feed(frames.encode_frame(FrameMeta()))


def test_a_stream_that_ends_inside_a_frame_is_an_error() -> None:
    decoder = frames.FrameDecoder()
    decoder.feed(frames.encode_frame(FrameMeta(), b"abc")[:-1])
    with pytest.raises(frames.FrameError, match="ended inside"):
        decoder.close()


def test_unknown_meta_of_a_newer_peer_is_ignored() -> None:
    meta = msgspec.msgpack.encode({"choice": 2, "from_the_future": [1, 2]})
    stream = struct.pack("<II", len(meta), 2) + meta + b"ok"
    assert frames.FrameDecoder().feed(stream) == [(FrameMeta(choice=2), b"ok")]


def test_a_payload_that_is_too_large_is_not_sent() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return frames.MAX_PAYLOAD_BYTES + 1

    with pytest.raises(frames.FrameError, match="payload"):
        frames.encode_frame(FrameMeta(), Huge())


def test_the_decoder_does_not_accumulate_a_long_stream() -> None:
    frame = frames.encode_frame(FrameMeta(), b"x" * 1000)
    decoder = frames.FrameDecoder()
    shifted = frame[7:] + frame[:7]
    decoder.feed(frame[:7])
    for _ in range(500):
        assert len(decoder.feed(shifted)) == 1
    assert len(decoder._buffer._data) < 200_000

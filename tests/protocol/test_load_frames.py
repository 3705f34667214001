"""Load frames in any chunks, and from peers of other versions."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol.frames import MAX_LOAD_BYTES, FrameError, LoadDecoder, encode_load
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import Arrivals, DeploymentLoad, EnginesLoad, Latencies, LoadFrame, QueueLoad

FRAMES = [
    LoadFrame(sequence=0),
    LoadFrame(
        sequence=1,
        deployments=[
            DeploymentLoad(
                namespace="ns",
                name="d",
                engines=EnginesLoad(truth="value", num_reporting=2, num_kv_bytes_total=10),
                queue=QueueLoad(num_requests=3, oldest_s=1.5, needs_engine=True),
                arrivals=Arrivals(truth="value", requests_per_s=2.5),
                latencies=Latencies(truth="value", ttft_ms=histogram_of([10.0, 20.0])),
            )
        ],
    ),
]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_frames_are_complete_in_any_chunking(sizes: list[int]) -> None:
    data, decoder, found = b"".join(map(encode_load, FRAMES)), LoadDecoder(), []
    for size in [*sizes, len(data)]:
        found += decoder.feed(data[:size])
        data = data[size:]
    decoder.close()
    assert found == FRAMES


def test_unknown_fields_of_a_newer_gateway_are_ignored_and_missing_ones_are_unknown() -> None:
    body = msgspec.msgpack.encode({"sequence": 3, "later": 1, "deployments": [{"namespace": "a", "name": "b", "x": 2}]})
    (frame,) = LoadDecoder().feed(struct.pack("<I", len(body)) + body)
    (load,) = frame.deployments
    assert (load.engines.truth, load.arrivals.truth, load.lengths.truth) == ("unknown", "unknown", "unknown")


@pytest.mark.parametrize("data", [struct.pack("<I", MAX_LOAD_BYTES + 1), struct.pack("<I", 3) + b"abc", b'{"deployme'])
def test_bytes_that_are_no_load_frame_fail_at_once(data: bytes) -> None:
    decoder = LoadDecoder()
    with pytest.raises(FrameError):
        decoder.feed(data)
    with pytest.raises(FrameError):
        decoder.feed(encode_load(FRAMES[0]))

"""The bench of 100 pods at one gateway: reports of the pods, when the gateway is complete, and missed goals."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gateway_pods
import pytest
from gateway_pods import Size, busy_options, faults, is_complete, measure
from routers import stage
from routers.busy import Busy, Habit
from routers.pod import FRAME_INTERVAL_S, Kind, Pod
from routers.stage import Cores
from waiting import START_LIMIT_S

from pagemill_protocol.frames import StateDecoder
from pagemill_routing.brain.placement.prefix_index import PrefixIndex

SIZE = Size(3, 0.2, num_prefix_chunks=64, num_shared=16, steps_per_s=20.0, churn=2, num_restarts=1, num_workers=1)


class VirtualLoop:
    """The part of an event loop that a pod uses, with a clock of its own."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._loop = asyncio.new_event_loop()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._loop)
        heapq.heappush(self._due, (when, next(self._numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args)

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self._now, _, handle = heapq.heappop(self._due)
            if not handle.cancelled():
                handle._run()
        self._now = end

    def close(self) -> None:
        self._loop.close()


class Reader:
    """The gateway's end of a state stream."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._decoder = StateDecoder()
        self.index = PrefixIndex()
        self.sequences: list[int] = []
        self.times: list[float] = []

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self.sequences.append(frame.sequence)
            self.times.append(self._loop.time())
            if frame.snapshot:
                self.index.snapshot("pod", frame.prefixes_added)
                continue
            self.index.remove("pod", frame.prefixes_removed)
            self.index.add("pod", frame.prefixes_added)


@pytest.mark.parametrize(("steps_per_s", "frames_per_s"), [(0.0, 1.0), (32.0, 20.0), (10.0, 10.0)])
def test_a_pod_reports_at_most_twenty_times_per_second(steps_per_s: float, frames_per_s: float) -> None:
    """This also holds after many heartbeats, and a gateway that follows has exactly the pod's state."""
    loop = VirtualLoop()
    pod = Pod(Kind("m", 0.01, 4096, ""), cast(asyncio.AbstractEventLoop, loop))
    Busy(pod, Habit(64, 16, steps_per_s, 2), cast(asyncio.AbstractEventLoop, loop)).begin()
    loop.run_until(1.5)
    reader = Reader(loop)
    pod.subscribe(cast(asyncio.Transport, reader), reader.write)
    loop.run_until(61.5)
    loop.close()
    assert len(reader.times) - 1 == pytest.approx(60 * frames_per_s, rel=0.05)
    pauses = [after - before for before, after in itertools.pairwise(reader.times[1:])]
    assert min(pauses) >= FRAME_INTERVAL_S - 1e-9
    assert reader.sequences == list(range(reader.sequences[0], reader.sequences[0] + len(reader.sequences)))
    assert len(reader.index.prefix_chunks_of("pod")) == len(reader.index) == 64


def test_a_gateway_is_complete_when_every_pod_is_ready_and_every_prefix_chunk_known() -> None:
    def metrics(ready: int, prefix_chunks: int) -> str:
        return (
            f'pagemill_gateway_endpoints{{model="m",phase="stale"}} 0.0\n'
            f'pagemill_gateway_endpoints{{model="m",phase="ready"}} {ready}.0\n'
            f"pagemill_gateway_prefix_chunks {prefix_chunks}.0\n"
        )

    assert SIZE.num_distinct == 3 * 48 + 16
    assert is_complete(metrics(3, 160), 3, SIZE.num_distinct)
    assert not is_complete(metrics(2, 160), 3, SIZE.num_distinct)
    assert not is_complete(metrics(3, 159), 3, SIZE.num_distinct)
    assert not is_complete("", 3, SIZE.num_distinct)


def test_goals_are_judged_only_if_the_pods_had_enough_cpu_time() -> None:
    good = {"cores": 0.05, "pods_cores": 0.5, "restarts": [{"whole_s": 2.0}]}
    assert faults("idle", good) == []
    assert faults("idle", {**good, "cores": 0.2}) == ["idle: 0.200 cores, the goal is 0.1"]
    assert faults("busy", {**good, "cores": 0.2}) == []
    assert len(faults("busy", {**good, "cores": 0.4, "restarts": [{"whole_s": 4.0}, {"whole_s": 5.0}]})) == 2
    assert "their frames came late" in faults("idle", {**good, "cores": 0.2, "pods_cores": 0.99})[0]


@pytest.mark.slow
@pytest.mark.model
def test_a_restarted_gateway_knows_all_pods_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stage, "FOLDER", tmp_path)
    monkeypatch.setattr(gateway_pods, "FOLDER", tmp_path)
    monkeypatch.setattr(gateway_pods, "SETTLE_S", 0.1)
    monkeypatch.setattr(gateway_pods, "START_TIMEOUT_S", START_LIMIT_S)
    monkeypatch.setattr(gateway_pods, "cores", lambda: Cores(0, [0]))
    found = measure(SIZE, SIZE.num_distinct, busy_options(SIZE))
    [restart] = found["restarts"]
    assert 0 < restart["first_answer_s"] <= restart["whole_s"]
    assert found["frames_per_s"] > 0

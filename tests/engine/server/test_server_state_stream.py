"""The state stream: a snapshot first, numbered changes, heartbeats, and a bounded buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from engine_ready import LIMITS, engine_ready
from hand_clock import Clock
from waiting import WAIT_LIMIT_S

from pagemill_engine.ipc.messages import PrefixEvents
from pagemill_engine.server.phases import state_stream
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.hashes import HASH_VERSION, NO_HASHES
from pagemill_protocol.report.state import EngineLoad, SlowRank, StateFrame
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


@pytest.fixture
def clock() -> Clock:
    """The clock by which silence counts. Frames are sent by the event loop's own clock."""
    return Clock()


@pytest.fixture
def heartbeat_s() -> float:
    """Longer than a test, since a frame that nothing has caused would be taken for the next change's."""
    return 3600.0


@pytest.fixture
async def publisher(monkeypatch: pytest.MonkeyPatch, clock: Clock, heartbeat_s: float) -> AsyncIterator[StatePublisher]:
    monkeypatch.setattr(state_stream, "HEARTBEAT_S", heartbeat_s)
    publisher = StatePublisher(["tiny"], clock)
    task = asyncio.create_task(publisher.run())
    yield publisher
    publisher.close()
    await asyncio.wait_for(task, WAIT_LIMIT_S)


READY = engine_ready(load=EngineLoad(num_kv_bytes_total=64, num_kv_bytes_evictable=4))


class Reader:
    def __init__(self, publisher: StatePublisher) -> None:
        self._publisher = publisher
        self._frames = aiter(publisher.subscribe())

    async def next(self) -> StateFrame:
        (frame,) = StateDecoder().feed(await asyncio.wait_for(anext(self._frames), WAIT_LIMIT_S))
        return frame

    async def fresh(self) -> StateFrame:
        """Return the first frame that is published from now on, whatever was published before and is unread."""
        published = self._publisher._frame.sequence
        while (frame := await self.next()).sequence <= published:
            pass
        return frame


def step(publisher: StatePublisher, running: int, added: list[bytes] = [], removed: list[bytes] = []) -> None:  # noqa: B006
    events = PrefixEvents(added=added, removed=removed) if added or removed else None
    publisher.report(EngineLoad(num_requests_running=running), None, events)


async def test_the_first_frame_is_a_complete_snapshot(publisher: StatePublisher) -> None:
    early = Reader(publisher)
    await early.next()
    step(publisher, 1, added=[b"a", b"b"])
    await early.next()
    late = await Reader(publisher).next()
    assert late.snapshot
    assert late.prefixes_added == [b"a", b"b"]
    assert late.load.num_requests_running == 1
    assert late.models == ["tiny"]


async def test_a_slow_rank_is_published_until_it_is_over(publisher: StatePublisher) -> None:
    reader, slow = Reader(publisher), SlowRank(1, 1, 41.5, 13.0)
    await reader.next()
    publisher.announce_slow_rank(slow)
    assert (await reader.next()).slow_rank == slow
    publisher.announce_slow_rank(None)
    assert (await reader.next()).slow_rank is None


async def test_the_frame_with_the_engines_identity_contains_its_capacity(publisher: StatePublisher) -> None:
    reader = Reader(publisher)
    await reader.next()
    publisher.describe(READY)
    described = await reader.next()
    assert described.max_model_len == 1024
    assert described.load == READY.load


@pytest.mark.parametrize(("caches_prefixes", "hash_version"), [(True, HASH_VERSION), (False, NO_HASHES)])
async def test_an_engine_without_a_prefix_cache_reports_so(
    publisher: StatePublisher, caches_prefixes: bool, hash_version: int
) -> None:
    reader = Reader(publisher)
    await reader.next()
    publisher.announce_bundle("bundle")
    await reader.next()
    publisher.describe(engine_ready(limits=replace(LIMITS, enable_prefix_caching=caches_prefixes)))
    assert (await reader.next()).digests.hash_version == hash_version


async def test_the_tokenizer_is_announced_before_the_engine_is_ready_and_kept(publisher: StatePublisher) -> None:
    reader = Reader(publisher)
    await reader.next()
    publisher.announce_bundle("bundle")
    early = await reader.next()
    assert (early.digests.tokenizer_bundle, early.max_model_len) == ("bundle", 0)
    publisher.describe(READY)
    described = await reader.next()
    assert (described.digests.tokenizer_bundle, described.digests.weights) == ("bundle", READY.limits.weights_digest)


async def test_changes_are_coalesced_and_numbered_without_gaps(publisher: StatePublisher) -> None:
    reader = Reader(publisher)
    frames = [await reader.next()]
    for running in range(200):
        step(publisher, running, added=[b"x%d" % running], removed=[b"x%d" % (running - 1)])
    while frames[-1].load.num_requests_running < 199:
        frames.append(await reader.next())
    assert len(frames) <= 4
    assert [frame.sequence for frame in frames] == list(range(frames[0].sequence, frames[0].sequence + len(frames)))
    known: set[bytes] = set()
    for frame in frames:
        known = (known - set(frame.prefixes_removed)) | set(frame.prefixes_added)
    assert known == {b"x199"}


@pytest.mark.parametrize("heartbeat_s", [0.05])
async def test_an_idle_engine_still_sends_heartbeats(publisher: StatePublisher) -> None:
    reader = Reader(publisher)
    first = await reader.next()
    second = await reader.next()
    assert second.sequence > first.sequence
    assert not second.snapshot


async def test_a_slow_reader_gets_a_snapshot_instead_of_a_backlog(
    publisher: StatePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_stream, "MAX_BACKLOG_FRAMES", 2)
    monkeypatch.setattr(state_stream, "MIN_INTERVAL_S", 0.001)
    slow, fast = Reader(publisher), Reader(publisher)
    await slow.next()
    await fast.next()
    for running in range(1, 6):
        step(publisher, running, added=[b"%d" % running])
        await fast.next()
    caught_up = await slow.next()
    assert caught_up.snapshot
    assert caught_up.prefixes_added == [b"1", b"2", b"3", b"4", b"5"]
    step(publisher, 6)
    following = await slow.next()
    assert (following.snapshot, following.sequence) == (False, caught_up.sequence + 1)


async def test_draining_is_reported_and_closing_ends_the_stream(publisher: StatePublisher) -> None:
    reader = Reader(publisher)
    await reader.next()
    publisher.set_draining()
    while not (await reader.next()).draining:
        pass  # frames of before, and those without news that show a stream is alive
    publisher.close()
    with pytest.raises(StopAsyncIteration):
        await reader.next()


@pytest.mark.parametrize("heartbeat_s", [0.05])
async def test_a_silent_engine_process_is_reported_after_three_seconds(publisher: StatePublisher, clock: Clock) -> None:
    reader = Reader(publisher)
    await reader.next()
    step(publisher, 1)
    clock.now += 2.9
    assert (await reader.fresh()).silent_s == 0.0
    clock.now += 0.2
    assert (await reader.fresh()).silent_s == 3.1
    step(publisher, 2)
    frame = await reader.fresh()
    assert (frame.load.num_requests_running, frame.silent_s) == (2, 0.0)


@pytest.mark.parametrize("heartbeat_s", [0.05])
async def test_heartbeats_during_a_long_step_report_a_running_engine_process(
    publisher: StatePublisher, clock: Clock
) -> None:
    reader = Reader(publisher)
    await reader.next()
    step(publisher, 1)
    await reader.fresh()
    for _ in range(3):
        clock.now += 2.0
        publisher.heartbeat(4000.0)
        frame = await reader.fresh()
    assert (frame.silent_s, frame.frozen_s, frame.expected_step_ms) == (6.0, 0.0, 4000.0)
    for _ in range(2):
        clock.now += 1.6
        frame = await reader.fresh()
    assert (frame.silent_s, frame.frozen_s) == (9.2, 3.2)


@pytest.mark.parametrize("heartbeat_s", [0.05])
async def test_time_in_which_the_server_did_not_run_is_not_counted_as_silence_of_the_engine(
    publisher: StatePublisher, clock: Clock
) -> None:
    reader = Reader(publisher)
    await reader.next()
    step(publisher, 1)
    publisher.heartbeat(0.0)
    await reader.fresh()
    clock.now += 1000.0
    assert (await reader.fresh()).frozen_s == 0.0, "one pause counts as two seconds"
    clock.now += 1.0
    assert (await reader.fresh()).frozen_s == 3.0


@pytest.mark.parametrize("heartbeat_s", [0.05])
async def test_an_engine_without_heartbeats_yet_does_not_count_as_suspended(
    publisher: StatePublisher, clock: Clock
) -> None:
    """While the model is loaded, the engine sends none."""
    reader = Reader(publisher)
    await reader.next()
    step(publisher, 1)
    await reader.fresh()
    clock.now += 5.0
    frame = await reader.fresh()
    assert (frame.silent_s, frame.frozen_s) == (5.0, 0.0)


def chat(num_tokens: int, predicted_cached_tokens: int = 0, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt_token_ids=[1] * num_tokens,
        sampling=SamplingParams(n=n),
        predicted_cached_tokens=predicted_cached_tokens,
    )


async def test_with_several_gateways_an_arrival_is_reported_before_the_engine_processes_it(
    publisher: StatePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interval is so long that only the arrival can cause the next frame.
    monkeypatch.setattr(state_stream, "MIN_INTERVAL_S", 60.0)
    one, other = Reader(publisher), Reader(publisher)
    for reader in (one, other):
        await reader.next()
    publisher.report(EngineLoad(num_requests_running=3), None, None, num_added=3)
    await one.next()
    await other.next()
    publisher.arrived(4, chat(100, predicted_cached_tokens=64, n=2))
    for reader in (one, other):
        load = (await reader.next()).load
        assert (load.num_requests_running, load.num_requests_waiting, load.num_tokens_waiting) == (3, 2, 36)


async def test_a_request_counts_once_whichever_process_reports_it(publisher: StatePublisher) -> None:
    one, _ = Reader(publisher), Reader(publisher)
    await one.next()
    publisher.arrived(1, chat(100))
    publisher.arrived(2, chat(50))
    frames = [await one.next()]
    assert frames[-1].load.num_tokens_waiting == 150
    publisher.report(EngineLoad(num_requests_running=1), None, None, num_added=1)
    while frames[-1].load.num_requests_running == 0:
        frames.append(await one.next())
    assert (frames[-1].load.num_requests_waiting, frames[-1].load.num_tokens_waiting) == (1, 50)
    publisher.report(EngineLoad(num_requests_running=2), None, None, num_added=2)
    while frames[-1].load.num_requests_running == 1:
        frames.append(await one.next())
    assert frames[-1].load == EngineLoad(num_requests_running=2)


async def test_a_single_gateway_gets_the_engine_processs_reports_only(publisher: StatePublisher) -> None:
    reader = Reader(publisher)
    await reader.next()
    publisher.arrived(1, chat(100))
    publisher.report(EngineLoad(num_requests_running=1), None, None, num_added=0)
    assert (await reader.next()).load == EngineLoad(num_requests_running=1)

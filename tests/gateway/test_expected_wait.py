"""The expected wait of a waiting request, learned from observed starts and from the rate of the queue."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import msgspec
import pytest
from hand_clock import Clock
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT_LIMIT_S

from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.state import Digests, StateFrame
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.admission.fair_queue import FairQueue, Waiter
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.endpoints.deployment import START_TIMING_LIMIT_S, StartEstimator
from pagemill_routing.brain.interface import Assignment, CompletedRequest, QueueTicket, RoutingRequest
from pagemill_routing.config import RoutingConfig

# -- starts ------------------------------------------------------------------------------------------------------------


def start(starts: StartEstimator, at: float, took_s: float, *, from_zero: bool = True) -> None:
    starts.requested(at, from_zero=from_zero)
    starts.requested(at + took_s, from_zero=from_zero)
    starts.served(at + took_s)


def test_the_expected_start_time_is_the_median_of_the_latest_starts() -> None:
    starts = StartEstimator()
    assert starts.left_s(0.0) is None
    for number, took_s in enumerate((10.0, 30.0, 50.0, 60.0, 250.0, 45.0)):
        start(starts, number * 1e6, took_s)
    starts.requested(1e9, from_zero=True)
    assert starts.left_s(1e9) == 50.0
    assert starts.left_s(1e9 + 20) == 30.0
    assert starts.left_s(1e9 + 49.9) == 1.0, "the start is due at any moment"
    assert starts.left_s(1e9 + 80) == 30.0, "a late start is expected to be as late again"


def test_restarts_are_learned_separately_from_starts_from_zero() -> None:
    starts = StartEstimator()
    start(starts, 0.0, 90.0)
    start(starts, 1e6, 5.0, from_zero=False)
    starts.requested(2e6, from_zero=True)
    assert starts.left_s(2e6) == 90.0
    starts.served(2e6)
    starts.requested(3e6, from_zero=False)
    assert starts.left_s(3e6) == 5.0


def test_start_times_that_engines_report_are_used_until_a_start_was_observed() -> None:
    starts = StartEstimator()
    starts.engine_reported({})
    assert starts.left_s(0.0) is None
    starts.engine_reported({"load": 8.0, "warm": 3.0, "first_token": 1.0})
    assert starts.left_s(0.0) == 12.0
    start(starts, 0.0, 70.0)
    starts.requested(1e6, from_zero=True)
    assert starts.left_s(1e6) == 70.0


def test_requests_wait_for_a_start_twice_as_long_as_a_start_takes() -> None:
    starts = StartEstimator()
    assert starts.waits_until(0.0) == -math.inf
    starts.requested(10.0, from_zero=True)
    assert starts.waits_until(10.0) == -math.inf, "the length of a start is not known yet"
    starts.requested(80.0, from_zero=True)
    starts.served(80.0)
    assert starts.waits_until(40.0) == -math.inf
    starts.requested(1000.0, from_zero=True)
    assert starts.waits_until(1030.0) == 1140.0
    starts.requested(1060.0, from_zero=True)
    starts.served(1060.0)
    assert starts.waits_until(1059.0) == 1140.0, "a request from the time of the start may still wait for its turn"
    assert starts.waits_until(1061.0) == -math.inf


def test_a_start_without_waiting_requests_expires() -> None:
    starts = StartEstimator()
    starts.requested(0.0, from_zero=True)
    starts.served(START_TIMING_LIMIT_S * 2)
    assert starts.left_s(START_TIMING_LIMIT_S * 2) is None, "the time of the request for the start is not known"
    starts.requested(1e6, from_zero=True)
    starts.requested(1e6 + START_TIMING_LIMIT_S * 2, from_zero=True)
    starts.served(1e6 + START_TIMING_LIMIT_S * 2 + 7.0)
    assert starts.left_s(2e6) == 7.0


# -- turns -------------------------------------------------------------------------------------------------------------

WAITERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(0, 100)), min_size=1, max_size=12)


@given(WAITERS)
def test_tokens_until_a_requests_turn_ends_equal_those_reported_at_its_arrival(
    kinds: list[tuple[str, int, int]],
) -> None:
    queue: FairQueue[Waiter] = FairQueue(100, 10**9)
    for at, (key, priority, cost) in enumerate(kinds):
        before = queue.tokens_before(key, priority, cost)
        queue.add(Waiter(key, priority, cost, 1, float(at), 1e9, ""))
        assert queue.tokens_until(float(at)) == before + cost
    assert queue.tokens_until(-1.0) == 0


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12))
def test_within_one_key_the_wait_is_the_sum_of_earlier_requests(costs: list[int]) -> None:
    queue: FairQueue[Waiter] = FairQueue(100, 10**9)
    for at, cost in enumerate(costs):
        queue.add(Waiter("k", 0, cost, 1, float(at), 1e9, ""))
    for at in range(len(costs)):
        assert queue.tokens_until(float(at)) == sum(costs[: at + 1])


# -- the brain ---------------------------------------------------------------------------------------------------------


class Fleet:
    """A brain in front of engines of one slot each, which start and stop."""

    def __init__(self, timeout_s: float = 500.0) -> None:
        self.clock = Clock()
        self.arrivals: list[float] = []
        queue = QueueLimits(max_requests=50, max_bytes=10**9, timeout_s=timeout_s)
        config = RoutingConfig(state_stale_after_s=1e9, queue=queue)
        self.brain = LocalBrain(config, clock=self.clock, rng=random.Random(1))
        self.catalog("")

    def catalog(self, names: str) -> None:
        endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in names]
        model = CatalogModel(deployment="d", name="m", endpoints=endpoints, wakes=True)
        self.brain.observer.apply_catalog(Catalog(models=[model]))

    def come(self, name: str, **fields: Any) -> None:
        self.catalog(name)
        digests = Digests(tokenizer_bundle="t", weights="w")
        frame = StateFrame(sequence=1, snapshot=True, max_model_len=100, max_num_seqs=1, digests=digests, **fields)
        self.brain.observer.observe(name, frame)

    def ask(self, deadline_s: float = math.inf) -> asyncio.Task[Assignment]:
        self.clock.now += 0.001
        self.arrivals.append(self.clock.now)
        ticket = QueueTicket(arrived_at=self.clock.now, deadline_at=self.clock.now + deadline_s, max_tokens=10)

        async def work() -> Assignment:
            target = await self.brain.find("m", ticket)
            waited = msgspec.structs.replace(ticket, waited_s=target.queued_s)
            return await self.brain.choose(target, frozenset(), RoutingRequest(10), ticket=waited)

        return asyncio.ensure_future(work())

    async def expected_s(self, arrived_at: float | None = None) -> float | None:
        return await self.brain.expected_s("m", QueueTicket(arrived_at=arrived_at or self.clock.now))


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_request_that_waits_for_a_start_from_zero_gets_the_length_of_the_last_start() -> None:
    fleet = Fleet()
    first = fleet.ask()
    await settle()
    assert await fleet.expected_s() is None, "no start was observed yet"
    fleet.clock.now += 40.0
    fleet.come("a")
    fleet.brain.finished(await first)
    fleet.clock.now += 1000.0
    fleet.catalog("")
    second = fleet.ask()
    await settle()
    assert await fleet.expected_s() == pytest.approx(40.0, abs=0.1)
    fleet.clock.now += 15.0
    late = fleet.ask()
    await settle()
    assert await fleet.expected_s() == pytest.approx(25.0, abs=0.1)
    for each in (second, late):
        each.cancel()


async def test_refusals_without_an_engine_state_when_to_retry() -> None:
    fleet = Fleet()
    first = fleet.ask()
    await settle()
    fleet.clock.now += 40.0
    fleet.come("a")
    fleet.brain.finished(await first)
    fleet.catalog("")
    waiting = [fleet.ask() for _ in range(50)]
    await settle()
    fleet.clock.now += 10.0
    with pytest.raises(PagemillError) as full:
        await fleet.ask()
    assert full.value.status == 429
    assert full.value.retry_after_s == pytest.approx(30.0, abs=0.5)
    for _ in range(50):
        fleet.clock.now += 10.0
        fleet.brain.queues.tick()
        await settle()
    with pytest.raises(PagemillError) as late:
        await waiting[0]
    assert (late.value.status, late.value.retry_after_s) == (503, 120), "the time to retry has an upper bound"
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_queues_timeout_refuses_no_request_during_a_start_of_known_length() -> None:
    fleet = Fleet(timeout_s=60.0)
    first = fleet.ask()
    await settle()
    fleet.clock.now += 59.0
    fleet.come("a")
    fleet.brain.finished(await first)
    fleet.clock.now += 1000.0
    fleet.catalog("")
    waiting = [fleet.ask(), fleet.ask(), fleet.ask()]
    hurried = fleet.ask(deadline_s=50.0)
    await settle()
    for _ in range(8):
        fleet.clock.now += 10.0
        fleet.brain.queues.tick()
        await settle()
    assert [each.done() for each in waiting] == [False, False, False], "80 s, which is more than the timeout"
    with pytest.raises(PagemillError) as late:
        await hurried
    assert late.value.code == "deadline_exceeded"
    fleet.come("a")
    await settle()
    fleet.brain.queues.tick()
    await settle()
    served = [each for each in waiting if each.done()]
    assert [each.exception() for each in served] == [None], "the engine has one slot; the others wait for it"
    fleet.clock.now += 40.0
    fleet.brain.queues.tick()
    await settle()
    assert all(each.done() for each in waiting), "twice the length of the start has passed"


async def test_the_expected_wait_for_capacity_follows_the_rate_of_the_queue() -> None:
    fleet = Fleet()
    fleet.come("a")
    tasks = [fleet.ask() for _ in range(30)]
    await settle()
    for number in range(10):  # one per second
        fleet.clock.now += 1.0
        fleet.brain.finished(tasks[number].result(), CompletedRequest(10))
        await settle()
    left_s = [await fleet.expected_s(at) for at in fleet.arrivals]
    waiting_s = [each for each in left_s[11:] if each is not None]
    assert len(waiting_s) == 19
    assert waiting_s == sorted(waiting_s)
    assert 0.5 <= waiting_s[0] <= 2.0
    assert 10.0 <= waiting_s[-1] <= 30.0
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_wait_for_a_model_that_is_not_served_is_unknown() -> None:
    assert await Fleet().brain.expected_s("other", QueueTicket()) is None


# -- comments in streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "comment"),
    [(33.6, b": waiting, about 34 s\n\n"), (0.0, b": waiting, about 1 s\n\n"), (None, b": waiting\n\n")],
)
async def test_comments_state_the_expected_wait(left_s: float | None, comment: bytes) -> None:
    engine_reported: asyncio.Queue[bytes] = asyncio.Queue()
    keep_alive = KeepAlive(0.02)

    async def expected() -> float | None:
        return left_s

    async with asyncio.timeout(WAIT_LIMIT_S):
        received = asyncio.create_task(engine_reported.get())
        assert await keep_alive.during(received, engine_reported.put, expected) == comment
    keep_alive.close()

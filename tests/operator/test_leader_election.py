"""Leader election: which operator may write, and until when. Each operator has a clock that the test controls."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.controller.leading.lease import LeaderElection, Leadership, LeaseSettings

DURATION_S, DEADLINE_S, RETRY_S = 15.0, 10.0, 2.0


class FakeLease:
    """One Lease with resource versions, as an API server stores it."""

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None
        self.version = 0
        self.is_down = False
        self.before_answer: Callable[[], None] = lambda: None
        """Called between a write and its answer."""

    async def read(self, timeout_s: float) -> dict[str, Any] | None:
        self._check()
        return copy.deepcopy(self.record)

    async def create(self, record: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._check()
        if self.record is not None:
            raise ApiError(409, "AlreadyExists", "it exists")
        return self._store(record)

    async def replace(self, record: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._check()
        if record["metadata"]["resourceVersion"] != str(self.version):
            raise ApiError(409, "Conflict", "it has changed")
        stored = self._store(record)
        self.before_answer()
        return stored

    def _store(self, record: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.record = {"metadata": {"resourceVersion": str(self.version)}, "spec": copy.deepcopy(record["spec"])}
        return copy.deepcopy(self.record)

    def _check(self) -> None:
        if self.is_down:
            raise Unreachable("the API server is away")

    @property
    def holder(self) -> str:
        assert self.record
        return str(self.record["spec"]["holderIdentity"])


class Candidate:
    """One operator. `turns` lets its election sleep that often; each sleep advances its clock."""

    def __init__(self, name: str, lease: FakeLease) -> None:
        self.now = 1000.0 * len(name)
        self.leadership = Leadership(DEADLINE_S, self.clock)
        self.election = LeaderElection(
            LeaseSettings(name, DURATION_S, DEADLINE_S, RETRY_S),
            lease,
            self.leadership,
            clock=self.clock,
            sleep=self.sleep,
        )
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self._turns = asyncio.Semaphore(0)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._turns.acquire()
        self.now += seconds
        self.on_sleep()

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self._turns.release()
            for _ in range(10):
                await asyncio.sleep(0)

    @property
    def may_write(self) -> bool:
        return self.leadership.remaining_s() > 0


@pytest.fixture
def lease() -> FakeLease:
    return FakeLease()


async def lead(candidate: Candidate) -> asyncio.Task[str]:
    await asyncio.wait_for(candidate.election.acquire(), WAIT_LIMIT_S)
    holding = asyncio.create_task(candidate.election.hold())
    await asyncio.sleep(0)
    return holding


async def follow(candidate: Candidate) -> asyncio.Task[None]:
    task = asyncio.create_task(candidate.election.acquire())
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_first_operator_takes_the_lease_and_the_second_waits(lease: FakeLease) -> None:
    first, second = Candidate("a", lease), Candidate("bb", lease)
    holding = await lead(first)
    waiting = await follow(second)
    for _ in range(20):
        await first.turn()
        await second.turn()
    assert first.may_write
    assert not second.may_write
    assert not waiting.done()
    await ended(holding)
    await ended(waiting)


async def test_a_dead_leader_is_replaced_exactly_when_its_lease_has_expired(lease: FakeLease) -> None:
    first, second = Candidate("a", lease), Candidate("bb", lease)
    holding = await lead(first)
    await ended(holding)
    waiting = await follow(second)
    seen_at = second.now
    while not waiting.done():
        assert lease.holder == "a"
        await second.turn()
    assert lease.holder == "bb"
    assert second.may_write
    assert DURATION_S <= second.now - seen_at <= DURATION_S + RETRY_S
    assert lease.record is not None
    assert lease.record["spec"]["leaseTransitions"] == 1


async def test_a_leader_may_write_until_its_deadline_after_the_start_of_the_last_renewal(lease: FakeLease) -> None:
    leader = Candidate("a", lease)
    holding = await lead(leader)
    await leader.turn(3)
    assert leader.leadership.remaining_s() == DEADLINE_S
    leader.now += DEADLINE_S - 0.1
    assert leader.may_write
    leader.now += 0.2
    assert not leader.may_write
    await ended(holding)


async def test_a_paused_leader_that_resumes_writes_nothing_and_learns_of_the_new_leader(lease: FakeLease) -> None:
    first, second = Candidate("a", lease), Candidate("bb", lease)
    holding = await lead(first)
    waiting = await follow(second)
    while not waiting.done():
        await second.turn()
    first.now += 60  # it was paused meanwhile
    assert not first.may_write
    await first.turn()
    assert await asyncio.wait_for(holding, WAIT_LIMIT_S) == "the Lease is held by bb now"
    assert not first.may_write
    assert lease.holder == "bb"


async def test_a_renewal_with_a_late_answer_gives_no_right_to_write(lease: FakeLease) -> None:
    leader = Candidate("a", lease)
    holding = await lead(leader)

    def pause() -> None:
        leader.now += DEADLINE_S + 1

    lease.before_answer = pause
    await leader.turn()
    assert not leader.may_write
    await ended(holding)


async def test_leadership_resumes_after_an_outage_if_no_other_operator_has_led(lease: FakeLease) -> None:
    leader = Candidate("a", lease)
    changes: list[bool] = []
    await leader.election.acquire()
    holding = asyncio.create_task(leader.election.hold(changes.append))
    lease.is_down = True
    await leader.turn(10)
    assert not leader.may_write
    assert changes == [False]
    lease.is_down = False
    await leader.turn()
    assert leader.may_write
    assert changes == [False, True]
    assert not holding.done()
    await ended(holding)


async def test_an_outage_is_not_counted_as_silence_of_the_leader(lease: FakeLease) -> None:
    first, second = Candidate("a", lease), Candidate("bb", lease)
    holding = await lead(first)
    waiting = await follow(second)
    lease.is_down = True
    await second.turn(30)
    lease.is_down = False
    await second.turn()
    assert lease.holder == "a"
    assert not waiting.done()
    await ended(holding)
    await ended(waiting)


async def test_a_released_lease_is_taken_at_the_next_poll(lease: FakeLease) -> None:
    first, second = Candidate("a", lease), Candidate("bb", lease)
    holding = await lead(first)
    waiting = await follow(second)
    await ended(holding)
    await first.election.release()
    assert not first.may_write
    assert lease.holder == ""
    await second.turn()
    await asyncio.wait_for(waiting, WAIT_LIMIT_S)
    assert second.may_write


async def test_an_operator_that_lost_the_lease_does_not_release_it(lease: FakeLease) -> None:
    first, second = Candidate("a", lease), Candidate("bb", lease)
    holding = await lead(first)
    await ended(holding)
    waiting = await follow(second)
    while not waiting.done():
        await second.turn()
    first.now += DEADLINE_S
    await first.election.release()
    assert lease.holder == "bb"


async def test_two_operators_that_take_a_free_lease_do_not_both_get_it(lease: FakeLease) -> None:
    candidates = [Candidate("a", lease), Candidate("bb", lease), Candidate("ccc", lease)]
    tasks = [await follow(candidate) for candidate in candidates]
    assert sum(candidate.may_write for candidate in candidates) == 1
    for task in tasks:
        await ended(task)


async def test_a_restarted_leader_of_the_same_name_continues_at_once(lease: FakeLease) -> None:
    holding = await lead(Candidate("a", lease))
    await ended(holding)
    again = Candidate("a", lease)
    await asyncio.wait_for(again.election.acquire(), WAIT_LIMIT_S)
    assert again.may_write
    assert lease.record is not None
    assert lease.record["spec"]["leaseTransitions"] == 0

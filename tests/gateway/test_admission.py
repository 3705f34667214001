"""The gate and the attempts: which requests are admitted, how often one is tried, and which error the client gets."""

from __future__ import annotations

import asyncio

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_gateway.limits.in_flight_limit import InFlightLimit, RunningRequests
from pagemill_protocol.errors import PagemillError
from pagemill_routing.attempts.attempt_failures import UpstreamFailure, record_failure
from pagemill_routing.attempts.attempts import MAX_CRASHES, MAX_ENDS, MAX_FAILED_ATTEMPTS, RETRY_PAUSE_MAX_S, Attempts
from pagemill_routing.attempts.engine_failures import EngineFailures
from pagemill_routing.brain.interface import Assignment, FailureKind


def test_the_gate_admits_up_to_its_limit_and_refuses_the_next_request_with_503() -> None:
    gate = InFlightLimit(2, 100)
    with gate.enter(), gate.enter():
        with pytest.raises(PagemillError) as error, gate.enter():
            pass
        assert error.value.status == 503
        assert error.value.retry_after_s
    with gate.enter():
        assert gate.num_in_flight == 1


async def test_a_request_that_fails_leaves_the_gate() -> None:
    gate = InFlightLimit(1, 100)
    for _ in range(3):
        with pytest.raises(RuntimeError), gate.enter():
            raise RuntimeError
    assert gate.num_in_flight == 0


async def test_a_closed_gate_lets_admitted_requests_finish_and_reports_when_it_is_empty() -> None:
    gate = InFlightLimit(2, 100)
    with gate.enter():
        gate.close("going down")
        with pytest.raises(PagemillError, match="going down"), gate.enter():
            pass
        empty = asyncio.create_task(gate.wait_empty())
        await asyncio.sleep(0)
        assert not empty.done()
    await asyncio.wait_for(empty, WAIT_LIMIT_S)


async def test_bytes_beyond_the_limit_are_refused_with_503_and_released_afterwards() -> None:
    gate = InFlightLimit(10, 100)
    with gate.enter() as first:
        first.hold(70)
        with gate.enter() as second:
            second.expect(30)
            second.hold(30)
            with pytest.raises(PagemillError) as error:
                second.hold(1)
            assert (error.value.status, error.value.retry_after_s) == (503, 1)
            assert gate.num_bytes == 100
        with gate.enter() as third, pytest.raises(PagemillError):
            third.expect(31)
        assert gate.num_bytes == 70
    assert gate.num_bytes == 0


def test_progress_resets_failures_but_their_total_is_bounded() -> None:
    attempts = Attempts(2)
    for number in range(MAX_FAILED_ATTEMPTS):
        assert not attempts.exhausted
        attempts.record_choice("a")
        attempts.progressed()
        attempts.record_break("gone.")
        assert (attempts.tried, attempts.num_counted) == (frozenset("a"), 1)
        assert attempts.count == number + 1
    assert attempts.exhausted


def test_the_number_of_attempts_is_bounded() -> None:
    attempts = Attempts(3)
    for endpoint in "abc":
        assert not attempts.exhausted
        attempts.record_choice(endpoint)
        attempts.record_break("gone.")
    assert attempts.exhausted
    assert attempts.tried == frozenset("abc")
    assert attempts.verdict().status == 502


def test_ended_engines_cost_no_attempt_but_have_their_own_bounds() -> None:
    attempts = Attempts(1)
    for number in range(MAX_ENDS):
        assert not attempts.exhausted
        attempts.record_choice(f"e{number}")
        attempts.ended("gone.", crashed=False)
    assert (attempts.exhausted, attempts.num_counted, len(attempts.tried)) == (True, 0, MAX_ENDS)
    attempts.progressed()
    for _ in range(MAX_CRASHES):
        assert not attempts.exhausted
        attempts.progressed()
        attempts.ended("broken.", crashed=True)
    assert attempts.exhausted


def test_full_engines_cost_no_attempt_and_are_avoided_until_the_request_has_waited() -> None:
    attempts = Attempts(1)
    for endpoint in "ab":
        attempts.record_choice(endpoint)
        attempts.refused("full.")
    assert (attempts.tried, attempts.num_refusals, attempts.num_counted) == (frozenset("ab"), 2, 0)
    assert not attempts.exhausted
    attempts.record_choice("c")
    attempts.record_decline("going.")
    attempts.queued(1.5)
    assert (attempts.tried, attempts.num_refusals, attempts.queued_s) == (frozenset("c"), 0, 1.5)
    assert attempts.pause_s("a") == 0
    attempts.record_choice("a")
    attempts.record_break("gone.")
    assert attempts.exhausted
    assert attempts.verdict().status == 502


def test_another_endpoint_is_tried_at_once_and_the_same_one_after_a_pause() -> None:
    attempts = Attempts(3)
    attempts.record_choice("a")
    attempts.record_break("gone.")
    assert attempts.pause_s("b") == 0
    first = attempts.pause_s("a")
    attempts.record_choice("a")
    attempts.record_break("gone.")
    assert 0 < first <= 0.1
    assert 0 < attempts.pause_s("a") <= 0.2
    for _ in range(MAX_FAILED_ATTEMPTS):
        attempts.record_decline("not yet.")
    assert 0 < attempts.pause_s("a") <= RETRY_PAUSE_MAX_S, "the pause has an upper bound"


@pytest.mark.parametrize(
    ("kind", "is_accepted", "num_counted", "num_refusals", "is_recorded"),
    [
        ("refused", False, 0, 1, False),
        ("declined", False, 0, 0, False),
        ("unreachable", False, 0, 0, False),
        ("lost", False, 0, 0, True),
        ("lost", True, 0, 0, True),
        ("killed", True, 0, 0, True),
        ("crashed", True, 0, 0, True),
        ("stalled", False, 1, 0, False),
        ("stalled", True, 1, 0, True),
        ("broken", True, 1, 0, False),
        ("request", True, 1, 0, False),
    ],
)
def test_each_kind_of_failure_uses_up_what_it_should(
    kind: FailureKind, is_accepted: bool, num_counted: int, num_refusals: int, is_recorded: bool
) -> None:
    attempts, engine_failures = Attempts(3), EngineFailures()
    attempts.record_choice("a")
    failure, assignment = UpstreamFailure(kind, "gone."), Assignment(1, "a", "", "")
    record_failure(failure, assignment, attempts, engine_failures, progressed=False, is_accepted=is_accepted)
    assert (attempts.num_counted, attempts.num_refusals) == (num_counted, num_refusals)
    assert bool(engine_failures.recorded) is is_recorded


def test_an_attempt_that_brought_tokens_forgets_earlier_failures_if_another_engine_can_continue() -> None:
    for can_continue, tried in [(True, {"b"}), (False, {"a", "b"})]:
        attempts = Attempts(3)
        for endpoint in "ab":
            attempts.record_choice(endpoint)
            record_failure(
                UpstreamFailure("broken", "gone."),
                Assignment(1, endpoint, "", ""),
                attempts,
                EngineFailures(),
                progressed=endpoint == "b",
                is_accepted=True,
                can_continue=can_continue,
            )
        assert attempts.tried == tried


async def test_a_missed_deadline_is_a_504_and_the_end_of_the_drain_a_503() -> None:
    running = RunningRequests()
    with pytest.raises(PagemillError) as error:
        async with running.limited(0.01):
            await asyncio.Event().wait()
    assert error.value.status == 504

    async def one() -> None:
        async with running.limited(None):
            await asyncio.Event().wait()

    task = asyncio.create_task(one())
    await asyncio.sleep(0)
    running.cancel_all()
    with pytest.raises(PagemillError) as error:
        await task
    assert error.value.status == 503
    with pytest.raises(PagemillError):
        await one()


async def test_an_inner_timeout_is_not_mistaken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with RunningRequests().limited(60):
            raise TimeoutError


async def test_ending_all_requests_skips_those_that_have_timed_out() -> None:
    running = RunningRequests()
    leaving, ended = asyncio.Event(), []

    async def run(timeout_s: float | None, seconds_to_leave: float) -> None:
        try:
            async with running.limited(timeout_s):
                try:
                    await asyncio.Event().wait()
                finally:
                    leaving.set()
                    await asyncio.sleep(seconds_to_leave)
        except PagemillError as error:
            ended.append(error.status)

    tasks = [asyncio.create_task(run(0.01, 0.2)), asyncio.create_task(run(None, 0))]
    await leaving.wait()
    running.cancel_all()
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_LIMIT_S)
    assert ended == [503, 503]

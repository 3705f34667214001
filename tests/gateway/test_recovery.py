"""After failures: how long an endpoint is ejected, which requests may be retried, and which must be probed alone."""

from __future__ import annotations

import asyncio
import random

import pytest
from hand_clock import Clock

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.state import Digests, StateFrame, StepTimeParams
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import (
    OTHER_WEIGHTS,
    Assignment,
    CompletedRequest,
    EngineFailure,
    FailureKind,
    QueueTicket,
    RetryContext,
    RoutingRequest,
)
from pagemill_routing.brain.resilience.recovery import FREE_RETRIES, RetryBudget
from pagemill_routing.brain.resilience.slowness import LEAST_SAMPLES, Slowness
from pagemill_routing.config import RoutingConfig


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def brain(clock: Clock) -> LocalBrain:
    config = RoutingConfig(state_stale_after_s=1e9, ejection_base_s=1.0, ejection_max_s=8.0, outage_wait_s=5.0)
    return LocalBrain(config, clock=clock, rng=random.Random(1))


def know(brain: LocalBrain, names: str, **weights: str) -> None:
    """Create endpoints named by the letters of `names`, all reporting."""
    endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in names]
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="m", name="m", endpoints=endpoints)]))
    for each in names:
        report(brain, each, weights.get(each, "w"))


def report(brain: LocalBrain, name: str, weights: str = "w", **fields: object) -> None:
    digests = Digests(tokenizer_bundle="t", weights=weights)
    brain.observer.observe(name, StateFrame(sequence=1, snapshot=True, max_model_len=100, digests=digests, **fields))


async def place(brain: LocalBrain, *tried: str, retry: RetryContext | None = None) -> Assignment:
    return await brain.choose(brain.resolve("m"), frozenset(tried), RoutingRequest(1), retry=retry)


async def place_at(brain: LocalBrain, name: str, names: str) -> Assignment:
    return await place(brain, *(set(names) - {name}))


def after(choice: Assignment, kind: FailureKind, **fields: object) -> RetryContext:
    return RetryContext(choice.decision, choice.endpoint_id, kind, **fields)


async def used(brain: LocalBrain, number: int = 20) -> set[str]:
    """Return the endpoints of requests that end at once."""
    found = set()
    for _ in range(number):
        choice = await place(brain)
        found.add(choice.endpoint_id)
        brain.finished(choice)
    return found


async def test_at_most_three_of_ten_reporting_endpoints_are_ejected(brain: LocalBrain) -> None:
    names = "abcdefghij"
    know(brain, names)
    for each in "abcde":
        brain.failed(await place_at(brain, each, names), "broken")
    assert len(await used(brain, 40)) == 7
    brain.observer.stream_lost("f")
    brain.failed(await place_at(brain, "f", names), "lost")
    assert "f" not in await used(brain, 40), "an endpoint without reports counts as lost, not as ejected"


async def test_an_endpoint_that_fails_after_every_good_start_is_ejected_for_longer_each_time(
    brain: LocalBrain, clock: Clock
) -> None:
    know(brain, "ab")
    pauses = []
    for _ in range(4):
        choice = await place_at(brain, "a", "ab")
        brain.started(choice)
        failed_at = clock()
        brain.failed(choice, "broken")
        while not brain.recovery.ejection(brain.registry.endpoints["a"]).allows(clock()):
            clock.now += 0.25
        pauses.append(clock() - failed_at)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    good = await place_at(brain, "a", "ab")
    brain.started(good)
    brain.finished(good, CompletedRequest(1))
    assert brain.recovery.ejection(brain.registry.endpoints["a"]).num_failures == 0


async def test_a_stream_that_began_before_the_ejection_does_not_end_it(brain: LocalBrain) -> None:
    know(brain, "ab")
    old, bad = await place_at(brain, "a", "ab"), await place_at(brain, "a", "ab")
    brain.failed(bad, "broken")
    brain.started(old)
    brain.finished(old, CompletedRequest(1))
    assert await used(brain) == {"b"}


async def test_a_silent_endpoint_that_failed_is_not_probed_before_it_reports(brain: LocalBrain, clock: Clock) -> None:
    know(brain, "ab")
    brain.failed(await place_at(brain, "a", "ab"), "stalled")
    brain.observer.stream_lost("a")
    clock.now += 100.0
    assert await used(brain) == {"b"}
    report(brain, "a")
    assert await used(brain) == {"a", "b"}


async def test_a_slow_endpoint_is_ejected_and_readmitted(brain: LocalBrain, clock: Clock) -> None:
    know(brain, "abc")
    for _ in range(LEAST_SAMPLES + 1):
        for each, ms in (("a", 200.0), ("b", 20.0), ("c", 22.0)):
            choice = await place_at(brain, each, "abc")
            brain.started(choice)
            brain.finished(choice, CompletedRequest(1, ms_per_token=ms))
    assert await used(brain) == {"b", "c"}
    clock.now += 21.0
    assert "a" in await used(brain)


def test_slowness_requires_other_endpoints_samples_and_a_noticeable_difference() -> None:
    slowness = Slowness()
    for number in range(LEAST_SAMPLES):
        slowness.note("a", 100.0, now=0.0)
        assert not slowness.is_slow("a", "ab", now=0.0), "there is no endpoint to compare with"
        slowness.note("b", 10.0, now=0.0)
        assert slowness.is_slow("a", "ab", now=0.0) == (number == LEAST_SAMPLES - 1)
    assert not slowness.is_slow("b", "ab", now=0.0)
    assert not slowness.is_slow("a", "ab", now=100.0), "the samples are too old"
    for _ in range(LEAST_SAMPLES):
        slowness.note("c", 1.0, now=0.0)
        slowness.note("d", 9.0, now=0.0)
    assert not slowness.is_slow("d", "cd", now=0.0)


# -- the retry budget --------------------------------------------------------------------------------------------------


def test_the_retry_budget_is_a_share_of_the_latest_requests_and_never_zero() -> None:
    budget = RetryBudget(share=0.2)
    assert [budget.take(0.0) for _ in range(FREE_RETRIES + 1)] == [True] * FREE_RETRIES + [False]
    for number in range(100):
        budget.began(5.0 + number / 1000)
    assert [budget.take(5.5) for _ in range(11)] == [True] * 10 + [False]
    assert budget.take(12.0), "the first retries have expired"
    assert sum(budget.take(30.0) for _ in range(50)) == FREE_RETRIES


async def test_retries_beyond_the_budget_are_refused_and_continuations_are_not(brain: LocalBrain) -> None:
    know(brain, "abc")
    beside = [await place_at(brain, "a", "abc") for _ in range(30)]
    for choice in beside:
        brain.failed(choice, "lost")
        await place(brain, "a", retry=after(choice, "lost", weights_digest="w"))
    failed = 0
    with pytest.raises(PagemillError) as refused:  # noqa: PT012
        for _ in range(100):
            choice = await place(brain)
            brain.failed(choice, "request")
            await place(brain, choice.endpoint_id, retry=after(choice, "request"))
            failed += 1
    assert (refused.value.status, refused.value.code) == (503, "retry_budget_exhausted")
    assert FREE_RETRIES <= failed < 25
    choice = await place(brain)
    brain.failed(choice, "refused")
    await place(brain, choice.endpoint_id, retry=after(choice, "refused"))


async def test_requests_of_one_failed_endpoint_need_no_budget(brain: LocalBrain) -> None:
    """An endpoint fails with many requests: all of them may be retried on another one."""
    know(brain, "ab")
    there = [await place_at(brain, "a", "ab") for _ in range(3 * FREE_RETRIES)]
    for choice in there:
        brain.failed(choice, "broken")
        assert (await place(brain, "a", retry=after(choice, "broken"))).endpoint_id == "b"


def test_one_account_leaves_retries_for_others_however_many_it_asks_for() -> None:
    budget = RetryBudget(share=0.2)
    assert sum(budget.take(0.0, "greedy") for _ in range(100)) == FREE_RETRIES
    assert sum(budget.take(0.0, "also greedy") for _ in range(100)) == FREE_RETRIES // 2
    assert budget.take(0.0, "modest")


def test_the_share_of_its_own_requests_is_an_accounts_alone() -> None:
    budget = RetryBudget(share=0.2)
    for number in range(1000):
        budget.began(0.0, "busy" if number < 100 else "others")
    taken = {name: sum(budget.take(0.0, name) for _ in range(1000)) for name in ("greedy", "idle", "others", "busy")}
    assert taken["greedy"] == 100, "half of the share of all"
    assert taken["others"] == 180
    assert taken["busy"] == 20
    assert taken["idle"] == 50


def test_accounts_are_forgotten_with_their_slots() -> None:
    budget = RetryBudget(share=0.2)
    for number in range(10_000):
        budget.began(float(number), f"account {number}")
    assert len(budget._requests._slots) <= 11


async def test_a_tenants_failing_requests_do_not_use_up_the_retries_of_another(brain: LocalBrain) -> None:
    know(brain, "abc")

    async def fails(account: str) -> None:
        ticket = QueueTicket(key=account)
        choice = await brain.choose(brain.resolve("m"), frozenset(), RoutingRequest(1), ticket=ticket)
        brain.failed(choice, "request")
        retry, tried = after(choice, "request"), frozenset({choice.endpoint_id})
        brain.finished(await brain.choose(brain.resolve("m"), tried, RoutingRequest(1), ticket=ticket, retry=retry))

    for _ in range(FREE_RETRIES):
        await fails("bad")
    with pytest.raises(PagemillError, match="second time"):
        await fails("bad")
    await fails("good")


async def test_only_engines_of_the_same_weights_continue_an_answer(brain: LocalBrain) -> None:
    know(brain, "abc", a="old", b="new", c="old")
    lost = await place_at(brain, "a", "abc")
    brain.failed(lost, "unreachable")
    retry = after(lost, "lost", weights_digest="old")
    assert {(await place(brain, "a", retry=retry)).endpoint_id for _ in range(4)} == {"c"}
    brain.observer.unreachable("c")
    with pytest.raises(PagemillError) as error:
        await place(brain, "a", retry=retry)
    assert error.value.code == OTHER_WEIGHTS


# -- probes ------------------------------------------------------------------------------------------------------------


def ended(
    *choices: Assignment, kind: FailureKind = "lost", progressed: bool = False
) -> dict[str, tuple[EngineFailure, ...]]:
    return {"engine_failures": tuple(EngineFailure(each.decision, kind, each.probe, progressed) for each in choices)}


async def end_all(brain: LocalBrain, name: str, choices: list[Assignment], kind: FailureKind) -> None:
    """End the engine with all its requests; the failure is known everywhere."""
    for choice in choices:
        brain.failed(choice, kind)
    brain.observer.stream_lost(name)
    brain.observer.unreachable(name)


async def test_a_probe_waits_until_another_one_is_cleared(brain: LocalBrain) -> None:
    know(brain, "abc")
    crashed = [await place_at(brain, "a", "abc") for _ in range(3)]
    await end_all(brain, "a", crashed, "crashed")
    retries = [after(each, "crashed", **ended(each, kind="crashed")) for each in crashed]
    first, second = [await place(brain, "a", retry=each) for each in retries[:2]]
    assert {first.endpoint_id, second.endpoint_id} == {"b", "c"}
    assert first.probe == "shared"
    third = asyncio.create_task(place(brain, "a", retry=retries[2]))
    await asyncio.sleep(0.05)
    assert not third.done()
    innocent = await place(brain)
    assert innocent.endpoint_id in "bc", "other requests need not wait"
    brain.started(second)
    assert (await third).endpoint_id == second.endpoint_id
    fourth = asyncio.create_task(place(brain, "a", retry=retries[2]))
    brain.failed(first, "request")
    assert (await fourth).endpoint_id == first.endpoint_id


async def test_a_request_that_crashes_an_engine_without_new_requests_is_blamed(brain: LocalBrain) -> None:
    know(brain, "abc")
    beside = await place_at(brain, "b", "abc")
    brain.started(beside)
    first = await place_at(brain, "a", "abc")
    await end_all(brain, "a", [first], "crashed")
    second = await place(brain, *"ac", retry=after(first, "crashed", **ended(first, kind="crashed")))
    assert second.endpoint_id == beside.endpoint_id == "b"
    await end_all(brain, "b", [second, beside], "crashed")
    with pytest.raises(PagemillError) as blamed:
        await place(brain, retry=after(second, "crashed", **ended(first, second, kind="crashed")))
    assert (blamed.value.status, blamed.value.code) == (500, "request_crashed_engine")
    other = after(beside, "crashed", **ended(beside, kind="crashed", progressed=True))
    assert (await place(brain, retry=other)).probe == "shared"


async def test_a_request_that_crashed_an_engine_beside_new_ones_is_probed_alone(brain: LocalBrain) -> None:
    know(brain, "abc")
    first = await place_at(brain, "a", "abc")
    await end_all(brain, "a", [first], "crashed")
    second = await place(brain, *"ac", retry=after(first, "crashed", **ended(first, kind="crashed")))
    newcomer = await place_at(brain, "b", "abc")
    assert newcomer.endpoint_id == second.endpoint_id
    await end_all(brain, "b", [newcomer, second], "crashed")
    waiting = await place(brain)
    retry = after(second, "crashed", **ended(first, second, kind="crashed"))
    third = asyncio.create_task(place(brain, retry=retry))
    await asyncio.sleep(0)
    assert not third.done(), "a request without a token is still on that engine"
    late = asyncio.create_task(place(brain))
    await asyncio.sleep(0)
    brain.started(waiting)
    alone = await third
    assert (alone.endpoint_id, alone.probe) == ("c", "alone")
    assert not late.done()
    brain.started(alone)
    assert (await late).endpoint_id == "c"


async def test_engines_killed_from_outside_cause_no_probe(brain: LocalBrain) -> None:
    know(brain, "abc")
    killed: list[Assignment] = []
    for name in "abc":
        killed.append(await place_at(brain, name, "abc"))
        brain.failed(killed[-1], "killed")
    retry = after(killed[-1], "killed", **ended(*killed, kind="killed"))
    assert (await place(brain, retry=retry)).probe == "none"


async def test_losses_cause_a_probe_only_if_no_token_comes_between(brain: LocalBrain) -> None:
    know(brain, "abcd")
    lost = []
    for name in "abc":
        lost.append(await place_at(brain, name, "abcd"))
        brain.failed(lost[-1], "lost")
    first, second, third = (ended(each)["engine_failures"][0] for each in lost)

    async def probe(*engine_failures: EngineFailure) -> str:
        choice = await place(brain, *"abc", retry=after(lost[2], "lost", engine_failures=engine_failures))
        brain.withdrawn(choice)
        return choice.probe

    assert await probe(first) == "none"
    assert await probe(first, second) == "shared"
    assert await probe(first, second._replace(progressed=True), third) == "none"
    assert await probe(first, second, third._replace(probe="shared")) == "alone"


async def test_a_request_sent_to_an_engine_that_was_already_gone_is_not_probed(brain: LocalBrain) -> None:
    know(brain, "ab")
    there, late = await place_at(brain, "a", "ab"), []
    brain.failed(there, "lost")
    for _ in range(3):
        late.append(await place_at(brain, "a", "ab"))
        brain.failed(late[-1], "lost")
    assert (await place(brain, "a", retry=after(late[-1], "lost", **ended(*late)))).probe == "none"


async def test_failures_that_also_happen_without_the_request_do_not_blame_it(brain: LocalBrain, clock: Clock) -> None:
    names = "abcdef"
    know(brain, names)

    async def lose(probe: str, name: str) -> EngineFailure:
        choice = await place_at(brain, name, names)
        await end_all(brain, name, [choice], "lost")
        clock.now += 1.0
        return EngineFailure(choice.decision, "lost", "shared" if probe == "shared" else "alone" if probe else "none")

    engine_failures = [await lose("", "a"), await lose("", "b"), await lose("shared", "c")]
    await end_all(brain, "d", [], "lost")
    engine_failures.append(await lose("alone", "e"))
    latest = Assignment(engine_failures[-1].decision, "e", "", "")
    choice = await place(brain, retry=after(latest, "lost", engine_failures=tuple(engine_failures)))
    assert choice.probe == "alone", "no request was on the fourth engine"
    clock.now += 60.0
    for each in names:
        report(brain, each)
    engine_failures = [await lose("", "a"), await lose("", "b"), await lose("shared", "c"), await lose("alone", "e")]
    with pytest.raises(PagemillError, match="alone"):
        await place(brain, retry=after(latest, "lost", engine_failures=tuple(engine_failures)))


# -- engines without steps ---------------------------------------------------------------------------------------------


async def test_an_engine_without_a_step_for_long_is_stuck(brain: LocalBrain) -> None:
    know(brain, "a")
    assert await brain.liveness("a") == "working"
    report(brain, "a", silent_s=5.9)
    assert await brain.liveness("a") == "working"
    report(brain, "a", silent_s=6.1)
    assert await brain.liveness("a") == "stuck"
    brain.observer.stream_lost("a")
    assert await brain.liveness("a") == "silent"


async def test_a_step_of_a_large_model_may_take_four_times_its_longest_prediction(brain: LocalBrain) -> None:
    know(brain, "a")
    step_time = StepTimeParams(knots_tokens=[16, 512], knot_ms=[400.0, 4000.0])
    report(brain, "a", silent_s=15.9, step_time=step_time)
    assert await brain.liveness("a") == "working"
    report(brain, "a", silent_s=16.1, step_time=step_time)
    assert await brain.liveness("a") == "stuck"


async def test_a_suspended_engine_process_is_stuck_however_long_its_steps_are(brain: LocalBrain) -> None:
    know(brain, "a")
    step_time = StepTimeParams(knots_tokens=[16, 512], knot_ms=[400.0, 4000.0])
    report(brain, "a", silent_s=4.0, frozen_s=4.0, step_time=step_time)
    assert await brain.liveness("a") == "working"
    report(brain, "a", silent_s=4.1, frozen_s=4.1, step_time=step_time)
    assert await brain.liveness("a") == "stuck"


async def test_a_step_is_judged_by_its_own_prediction_and_not_by_the_longest(brain: LocalBrain) -> None:
    know(brain, "a")
    step_time = StepTimeParams(knots_tokens=[16, 512], knot_ms=[400.0, 4000.0])
    report(brain, "a", silent_s=6.1, expected_step_ms=4000.0, step_time=step_time)
    assert await brain.liveness("a") == "working"
    report(brain, "a", silent_s=6.1, expected_step_ms=400.0, step_time=step_time)
    assert await brain.liveness("a") == "stuck"


async def test_a_hang_in_a_prompt_of_two_thousand_tokens_is_detected_within_seven_seconds(brain: LocalBrain) -> None:
    """A small model's step of 2,048 tokens takes 1.6 s on two cores; two and a half times as long is no hang."""
    know(brain, "a")
    report(brain, "a", silent_s=6.0, expected_step_ms=1600.0)
    assert await brain.liveness("a") == "working"
    report(brain, "a", silent_s=7.0, expected_step_ms=1600.0)
    assert await brain.liveness("a") == "stuck"


async def test_an_ejected_engine_that_is_suspended_is_not_probed(brain: LocalBrain, clock: Clock) -> None:
    know(brain, "ab")
    brain.failed(await place_at(brain, "a", "ab"), "stalled")
    clock.now += 60.0
    report(brain, "a", silent_s=60.0, frozen_s=60.0)
    assert await used(brain) == {"b"}
    report(brain, "a")
    assert await used(brain) == {"a", "b"}

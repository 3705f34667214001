"""After a failure: who stays out and for how long, who may try again, and who must do so alone."""

from __future__ import annotations

import asyncio
import random

import pytest
from hand_clock import Clock

from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.brain.interface import OTHER_WEIGHTS, Again, Ask, Choice, FailureKind, Served
from pagemill_gateway.brain.retry_budget import FREE_RETRIES, RetryBudget
from pagemill_gateway.brain.slowness import LEAST_SAMPLES, Slowness
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.relay.suspicion import Suspicion
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.state import Digests, StateFrame


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def brain(clock: Clock) -> LocalBrain:
    config = GatewayConfig(state_stale_after_s=1e9, ejection_base_s=1.0, ejection_max_s=8.0, outage_wait_s=5.0)
    return LocalBrain(config, clock=clock, rng=random.Random(1))


def know(brain: LocalBrain, names: str, **weights: str) -> None:
    """Endpoints called by the letters of `names`, all reporting."""
    endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in names]
    brain.apply_catalog(Catalog(models=[CatalogModel(deployment="m", name="m", endpoints=endpoints)]))
    for each in names:
        report(brain, each, weights.get(each, "w"))


def report(brain: LocalBrain, name: str, weights: str = "w", **fields: object) -> None:
    digests = Digests(tokenizer_bundle="t", weights=weights)
    brain.observe(name, StateFrame(sequence=1, snapshot=True, max_model_len=100, digests=digests, **fields))


async def place(brain: LocalBrain, *tried: str, again: Again | None = None) -> Choice:
    return await brain.choose(brain.resolve("m"), frozenset(tried), Ask(1), again=again)


async def place_at(brain: LocalBrain, name: str, names: str) -> Choice:
    return await place(brain, *(set(names) - {name}))


def after(choice: Choice, kind: FailureKind, **fields: object) -> Again:
    return Again(choice.decision, choice.endpoint_id, kind, **fields)


async def used(brain: LocalBrain, number: int = 20) -> set[str]:
    """Where requests go that leave at once."""
    found = set()
    for _ in range(number):
        choice = await place(brain)
        found.add(choice.endpoint_id)
        brain.finished(choice)
    return found


async def test_at_most_three_of_ten_that_report_are_kept_out(brain: LocalBrain) -> None:
    names = "abcdefghij"
    know(brain, names)
    for each in "abcde":
        brain.failed(await place_at(brain, each, names), "broken")
    assert len(await used(brain, 40)) == 7
    brain.stream_lost("f")
    brain.failed(await place_at(brain, "f", names), "lost")
    assert "f" not in await used(brain, 40), "one that is silent as well is lost, not suspected"


async def test_an_endpoint_that_fails_after_every_good_start_is_out_for_longer_each_time(
    brain: LocalBrain, clock: Clock
) -> None:
    know(brain, "ab")
    pauses = []
    for _ in range(4):
        choice = await place_at(brain, "a", "ab")
        brain.started(choice)
        failed_at = clock()
        brain.failed(choice, "broken")
        while not brain.registry.endpoints["a"].ejection.allows(clock()):
            clock.now += 0.25
        pauses.append(clock() - failed_at)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    good = await place_at(brain, "a", "ab")
    brain.started(good)
    brain.finished(good, Served(1))
    assert brain.registry.endpoints["a"].ejection.num_failures == 0


async def test_a_stream_begun_before_the_ejection_does_not_end_it(brain: LocalBrain) -> None:
    know(brain, "ab")
    old, bad = await place_at(brain, "a", "ab"), await place_at(brain, "a", "ab")
    brain.failed(bad, "broken")
    brain.started(old)
    brain.finished(old, Served(1))
    assert await used(brain) == {"b"}


async def test_a_silent_endpoint_that_failed_is_not_probed_before_it_reports(brain: LocalBrain, clock: Clock) -> None:
    know(brain, "ab")
    brain.failed(await place_at(brain, "a", "ab"), "stalled")
    brain.stream_lost("a")
    clock.now += 100.0
    assert await used(brain) == {"b"}
    report(brain, "a")
    assert await used(brain) == {"a", "b"}


async def test_a_slow_endpoint_is_ejected_and_comes_back(brain: LocalBrain, clock: Clock) -> None:
    know(brain, "abc")
    for _ in range(LEAST_SAMPLES + 1):
        for each, ms in (("a", 200.0), ("b", 20.0), ("c", 22.0)):
            choice = await place_at(brain, each, "abc")
            brain.started(choice)
            brain.finished(choice, Served(1, ms_per_token=ms))
    assert await used(brain) == {"b", "c"}
    clock.now += 21.0
    assert "a" in await used(brain)


def test_slowness_needs_siblings_samples_and_a_difference_that_is_felt() -> None:
    slowness = Slowness()
    for number in range(LEAST_SAMPLES):
        slowness.note("a", 100.0, now=0.0)
        assert not slowness.is_slow("a", "ab", now=0.0), "nobody to compare with"
        slowness.note("b", 10.0, now=0.0)
        assert slowness.is_slow("a", "ab", now=0.0) == (number == LEAST_SAMPLES - 1)
    assert not slowness.is_slow("b", "ab", now=0.0)
    assert not slowness.is_slow("a", "ab", now=100.0), "that was long ago"
    for _ in range(LEAST_SAMPLES):
        slowness.note("c", 1.0, now=0.0)
        slowness.note("d", 9.0, now=0.0)
    assert not slowness.is_slow("d", "cd", now=0.0)


# -- who may try again -------------------------------------------------------------------------------------------------


def test_the_budget_is_a_share_of_the_latest_requests_and_never_nothing() -> None:
    budget = RetryBudget(share=0.2)
    assert [budget.take(0.0) for _ in range(FREE_RETRIES + 1)] == [True] * FREE_RETRIES + [False]
    for number in range(100):
        budget.began(5.0 + number / 1000)
    assert [budget.take(5.5) for _ in range(11)] == [True] * 10 + [False]
    assert budget.take(12.0), "the first ones are forgotten"
    assert sum(budget.take(30.0) for _ in range(50)) == FREE_RETRIES


async def test_retries_beyond_the_budget_are_refused_and_continuing_lost_streams_is_not(brain: LocalBrain) -> None:
    know(brain, "abc")
    beside = [await place_at(brain, "a", "abc") for _ in range(30)]
    for choice in beside:
        brain.failed(choice, "lost")
        await place(brain, "a", again=after(choice, "lost", weights_digest="w"))
    failed = 0
    with pytest.raises(PagemillError) as refused:  # noqa: PT012
        for _ in range(100):
            choice = await place(brain)
            brain.failed(choice, "request")
            await place(brain, choice.endpoint_id, again=after(choice, "request"))
            failed += 1
    assert (refused.value.status, refused.value.code) == (503, "retry_budget_exhausted")
    assert FREE_RETRIES <= failed < 25
    choice = await place(brain)
    brain.failed(choice, "refused")
    await place(brain, choice.endpoint_id, again=after(choice, "refused"))


async def test_requests_of_one_incident_are_no_retry_storm(brain: LocalBrain) -> None:
    """An endpoint turns bad with many requests on it: all of them may go elsewhere."""
    know(brain, "ab")
    there = [await place_at(brain, "a", "ab") for _ in range(3 * FREE_RETRIES)]
    for choice in there:
        brain.failed(choice, "broken")
        assert (await place(brain, "a", again=after(choice, "broken"))).endpoint_id == "b"


async def test_only_engines_of_the_same_weights_continue_an_answer(brain: LocalBrain) -> None:
    know(brain, "abc", a="old", b="new", c="old")
    lost = await place_at(brain, "a", "abc")
    brain.failed(lost, "unreachable")
    again = after(lost, "lost", weights_digest="old")
    assert {(await place(brain, "a", again=again)).endpoint_id for _ in range(4)} == {"c"}
    brain.unreachable("c")
    with pytest.raises(PagemillError) as error:
        await place(brain, "a", again=again)
    assert error.value.code == OTHER_WEIGHTS


# -- who must be alone -------------------------------------------------------------------------------------------------


async def test_a_suspect_waits_until_another_one_is_cleared(brain: LocalBrain) -> None:
    know(brain, "abc")
    crashed = [await place_at(brain, "a", "abc") for _ in range(3)]
    for choice in crashed:
        brain.failed(choice, "crashed")
    brain.unreachable("a")
    first, second = [await place(brain, "a", again=after(each, "crashed", alone=True)) for each in crashed[:2]]
    assert {first.endpoint_id, second.endpoint_id} == {"b", "c"}
    third = asyncio.create_task(place(brain, "a", again=after(crashed[2], "crashed", alone=True)))
    await asyncio.sleep(0.05)
    assert not third.done()
    innocent = await place(brain)
    assert innocent.endpoint_id in "bc", "others need not wait"
    brain.started(second)
    assert (await third).endpoint_id == second.endpoint_id
    fourth = asyncio.create_task(place(brain, "a", again=after(crashed[2], "crashed", alone=True)))
    brain.failed(first, "request")
    assert (await fourth).endpoint_id == first.endpoint_id


def test_a_crash_makes_suspect_and_a_second_convicts() -> None:
    suspicion = Suspicion()
    assert not suspicion.must_be_alone
    suspicion.failed("crashed", progressed=True)
    assert (suspicion.must_be_alone, suspicion.convicted) == (True, False)
    suspicion.failed("crashed", progressed=True)
    assert suspicion.convicted


def test_lost_engines_make_suspect_only_when_no_token_comes_between() -> None:
    suspicion = Suspicion()
    for _ in range(20):
        suspicion.failed("lost", progressed=True)
    assert not suspicion.must_be_alone
    suspicion.failed("lost", progressed=False)
    assert not suspicion.must_be_alone
    suspicion.failed("lost", progressed=False)
    assert (suspicion.must_be_alone, suspicion.convicted) == (True, False)
    suspicion.failed("lost", progressed=False)
    assert suspicion.convicted


# -- silence -----------------------------------------------------------------------------------------------------------


async def test_an_engine_that_makes_no_step_for_long_is_not_alive(brain: LocalBrain) -> None:
    know(brain, "a")
    assert await brain.alive("a")
    report(brain, "a", silent_s=44.0)
    assert await brain.alive("a")
    report(brain, "a", silent_s=46.0)
    assert not await brain.alive("a")

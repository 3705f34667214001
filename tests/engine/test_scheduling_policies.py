"""Scheduling policies: the order of prompts, no starvation, and no long prompt that stalls decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hand_clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.config import EngineConfig
from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.order import POLICIES
from pagemill_engine.scheduler.order.priority import LEVEL_S
from pagemill_engine.scheduler.order.shortest_prefill_first import TOKEN_MS
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_execution.runners.null import NullRunner
from pagemill_execution.step import StepPlan, StepResult
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import LOW_PRIORITY, SamplingParams

STEP_TIME = StepTimeParams(knots_tokens=[1, 512, 4096], knot_ms=[5.0, 30.0, 240.0])


def make_scheduler(clock: Clock, policy: Any, **settings: Any) -> Scheduler:
    limits: dict[str, Any] = {"num_blocks": 4096, "block_size": 4, "max_model_len": 4096, "vocab_size": 100, "seed": 1}
    return Scheduler(SchedulerLimits(policy=policy, **{**limits, **settings}), clock)


def request(name: str, num_tokens: int, priority: int = 0, max_tokens: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt_token_ids=[sum(map(ord, name)) % 100] * num_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        priority=priority,
    )


def run(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult(token_ids={key: [7] for key in plan.samples}))
    return plan


def order_of_ends(scheduler: Scheduler) -> list[str]:
    ends = []
    while scheduler.has_work:
        run(scheduler)
        ends += [out.request_id for out in scheduler.take_outputs() if out.finish_reason is not None]
    return ends


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["long", "short", "urgent"]),
        ("priority", ["urgent", "long", "short"]),
        ("shortest-prefill-first", ["short", "urgent", "long"]),
    ],
)
def test_each_policy_has_its_order(policy: str, order: list[str]) -> None:
    scheduler = make_scheduler(Clock(), policy, max_num_seqs=1)
    scheduler.add(request("long", 60))
    scheduler.add(request("short", 5))
    scheduler.add(request("urgent", 20, priority=-1))
    assert order_of_ends(scheduler) == order


def test_a_short_prompt_is_computed_between_two_chunks_of_a_long_one() -> None:
    scheduler = make_scheduler(Clock(), "shortest-prefill-first", max_num_batched_tokens=16)
    scheduler.add(request("long", 100))
    assert run(scheduler).num_scheduled_tokens == {"long/0": 16}
    scheduler.add(request("short", 10))
    assert run(scheduler).num_scheduled_tokens == {"short/0": 10, "long/0": 6}


def test_under_fcfs_a_long_prompt_keeps_the_budget_that_it_got_first() -> None:
    scheduler = make_scheduler(Clock(), "fcfs", max_num_batched_tokens=16)
    scheduler.add(request("long", 100))
    run(scheduler)
    scheduler.add(request("short", 10))
    assert run(scheduler).num_scheduled_tokens == {"long/0": 16}


def test_a_priority_level_is_worth_a_fixed_number_of_seconds() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock, "priority", max_num_seqs=1)
    scheduler.add(request("low", 5, priority=1))
    clock.now += LEVEL_S - 1
    scheduler.add(request("within", 5))
    clock.now += 2
    scheduler.add(request("after", 5))
    assert order_of_ends(scheduler) == ["within", "low", "after"]


@pytest.mark.parametrize(("victim", "lead_s"), [((5, 1), LEVEL_S), ((200, 0), 195 * TOKEN_MS / 1000)])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_no_request_starves_however_many_others_arrive(policy: str, victim: tuple[int, int], lead_s: float) -> None:
    """One request arrives in each step and one can be served, so the queue never empties."""
    num_tokens, priority = victim
    clock = Clock()
    scheduler = make_scheduler(clock, policy, max_num_seqs=1, max_num_batched_tokens=256)
    scheduler.add(request("first", 5))
    scheduler.add(request("victim", num_tokens, priority))
    start_s, arrivals, period_s = clock.now, 0, 0.05
    while True:
        arrivals += 1
        scheduler.add(request(f"other-{arrivals}", 5))
        clock.now += period_s
        run(scheduler)
        if any(out.request_id == "victim" for out in scheduler.take_outputs()):
            break
        assert clock.now - start_s <= lead_s + 5 * period_s, (
            "the low-priority request must be served before those that arrived after its lead"
        )


@settings(max_examples=num_examples(100), deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.integers(1, 300), st.integers(-3, 3), st.floats(0, 5)), min_size=2, max_size=12),
)
def test_a_later_equal_request_never_overtakes_an_earlier_one(
    policy: Any, arrivals: list[tuple[int, int, float]]
) -> None:
    """Of two equal requests the earlier is served first, whatever requests are between them."""
    clock = Clock()
    scheduler = make_scheduler(clock, policy, max_num_seqs=1, max_num_batched_tokens=512)
    for index, (num_tokens, priority, pause_s) in enumerate(arrivals):
        clock.now += pause_s
        scheduler.add(request(f"{index}", num_tokens, priority))
    order = [int(name) for name in order_of_ends(scheduler)]
    assert sorted(order) == list(range(len(arrivals)))
    for kind in {arrival[:2] for arrival in arrivals}:
        twins = [index for index in order if arrivals[index][:2] == kind]
        assert twins == sorted(twins)


# -- decodes -----------------------------------------------------------------------------------------------------------


def decode_gaps_ms(policy: str, budget: int, prompt_tokens: int) -> Iterator[float]:
    """Yield the gaps between tokens of eight streams on a simulated device, while a long prompt is computed."""
    clock = Clock()
    config = EngineConfig(
        model="m",
        policy=policy,  # type: ignore[arg-type]
        max_num_batched_tokens=budget,
        max_model_len=8192,
        step_time=STEP_TIME,
        seed=1,
    )

    def sleep(seconds: float) -> None:
        clock.now += seconds

    core = EngineCore(config, NullRunner.from_config(config, clock=clock, sleep=sleep), clock=clock)
    for index in range(8):
        core.add(request(f"stream-{index}", 16, max_tokens=200))
    last_s: dict[str, float] = {}
    for step in range(400):
        if step == 20:
            core.add(request("long", prompt_tokens, priority=-1))
        for out in core.step().outputs:
            if out.request_id in last_s:
                yield (clock.now - last_s[out.request_id]) * 1000
            last_s[out.request_id] = clock.now
    assert "long" in last_s
    assert not core.has_work


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("budget", [128, 512])
def test_a_long_prompt_stalls_no_stream_for_longer_than_one_step_of_the_token_budget(policy: str, budget: int) -> None:
    gaps_ms = list(decode_gaps_ms(policy, budget, prompt_tokens=4096))
    bound_ms = StepTimeModel.from_params(STEP_TIME).predict_ms(budget)
    assert len(gaps_ms) == 8 * 199
    assert max(gaps_ms) <= bound_ms * 1.001
    assert max(gaps_ms) > bound_ms * 0.9, "the long prompt must fill the token budget"


@pytest.mark.parametrize("policy", POLICIES)
def test_low_priority_prompts_are_computed_after_all_others(policy: str) -> None:
    clock = Clock()
    scheduler = make_scheduler(clock, policy, max_num_batched_tokens=256)
    scheduler.add(request("batch", 200, LOW_PRIORITY))
    clock.now += 1000.0
    scheduler.add(request("live", 400))
    assert run(scheduler).num_scheduled_tokens == {"live/0": 256}
    assert run(scheduler).num_scheduled_tokens == {"live/0": 144, "batch/0": 112}


def test_low_priority_sequences_leave_a_full_batch_to_waiting_requests() -> None:
    scheduler = make_scheduler(Clock(), "fcfs", max_num_seqs=2)
    scheduler.add(request("live-1", 8, max_tokens=5))
    scheduler.add(request("batch", 8, LOW_PRIORITY, max_tokens=3))
    run(scheduler)
    scheduler.add(request("batch-2", 8, LOW_PRIORITY))
    assert run(scheduler).num_scheduled_tokens == {"live-1/0": 1, "batch/0": 1}
    assert scheduler.load().num_low_priority_requests == 2
    scheduler.add(request("live-2", 8, max_tokens=2))
    assert run(scheduler).num_scheduled_tokens == {"live-1/0": 1, "live-2/0": 8}
    assert scheduler.load().num_low_priority_requests == 2, "both must wait now"
    assert order_of_ends(scheduler) == ["live-2", "live-1", "batch", "batch-2"]
    assert scheduler.num_preemptions == 1
    assert scheduler.load().num_low_priority_requests == 0

"""The null runner waits for the predicted time of a step and refuses plans that violate the contract."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.config import SimulatedKinds
from pagemill_execution.runners.null import NullRunner, StepPlanError
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan, TableChanges
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

STEP_TIME = StepTimeParams(knots_tokens=[1, 100], knot_ms=[10.0, 109.0], decode_context_ms=0.5)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def make_runner(clock: Clock | None = None, stages: int = 1) -> NullRunner:
    clock = clock or Clock()
    config = EngineConfig(model="m", block_size=4, num_kv_blocks=16, vocab_size=500, step_time=STEP_TIME)
    config = msgspec.structs.replace(config, pipeline_parallel_size=stages)
    return NullRunner.from_config(config, clock=clock.now, sleep=clock.sleep)


def row(name: str, num_tokens: int = 3, blocks: int = 1, **changes: Any) -> AdmittedSequence:
    settings: dict[str, Any] = {
        "num_prompt_tokens": num_tokens,
        "num_computed_tokens": 0,
        "tables": [HeldBlocks(0, list(range(blocks)))],
        "sampling": SamplingParams(),
        "choice": 0,
        "seed": 5,
    }
    return AdmittedSequence(name, [1] * num_tokens, **{**settings, **changes})


def run(runner: NullRunner, plan: StepPlan) -> dict[str, list[int]]:
    return runner.wait(runner.launch(plan)).token_ids


def start(name: str = "a", **changes: Any) -> StepPlan:
    admitted = row(name, **changes)
    return StepPlan(1, {name: len(admitted.token_ids)}, admitted=[admitted], samples={name})


def test_a_step_takes_the_predicted_time() -> None:
    clock = Clock()
    runner = make_runner(clock)
    plan = start()
    plan.decode_context_tokens = 20
    run(runner, plan)
    assert clock.now_s == pytest.approx((10 + 2 + 10) / 1000)


def test_launch_returns_at_once_and_wait_counts_from_launch() -> None:
    clock = Clock()
    runner = make_runner(clock)
    handle = runner.launch(start())
    assert clock.now_s == 0
    clock.now_s = 0.004
    runner.wait(handle)
    assert clock.now_s == pytest.approx(0.012)


def test_tokens_depend_on_seed_choice_and_position_only() -> None:
    def tokens(admitted: AdmittedSequence) -> list[int]:
        runner = make_runner()
        first = StepPlan(1, {"a": len(admitted.token_ids)}, admitted=[admitted], samples={"a"})
        return [*run(runner, first)["a"], *run(runner, StepPlan(2, {"a": 1}, samples={"a"}))["a"]]

    base = tokens(row("a", blocks=2))
    assert all(0 <= token_id < 500 for token_id in base)
    assert base[0] != base[1]
    assert tokens(row("a", num_tokens=5, blocks=2)) == base
    assert tokens(row("a", blocks=2, seed=6)) != base
    assert tokens(row("a", blocks=2, choice=1)) != base
    # Preempted after one token and admitted again, the second token is the same.
    assert tokens(row("a", num_tokens=4, blocks=2, num_prompt_tokens=3))[0] == base[1]


def test_negative_seeds_are_valid() -> None:
    assert run(make_runner(), start(seed=-(2**63)))["a"] != run(make_runner(), start(seed=2**63 - 1))["a"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, {"a": 1}, samples={"a"}), "never admitted"),
        (StepPlan(1, {"a": 5}, admitted=[row("a", 5)], samples={"a"}), "too few blocks"),
        (StepPlan(1, {"a": 3}, admitted=[row("a")]), "samples=False"),
        (StepPlan(1, {"a": 2}, admitted=[row("a")], samples={"a"}), "computes 2 of 3"),
        (StepPlan(1, {"a": 4}, admitted=[row("a")], samples={"a"}), "computes 4 of 3"),
        (StepPlan(1, {"a": 3}, admitted=[row("a"), row("a")], samples={"a"}), "admitted twice"),
    ],
)
def test_a_plan_that_violates_the_contract_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(StepPlanError, match=message):
        make_runner().launch(plan)


def test_blocks_and_releases_are_tracked() -> None:
    runner = make_runner()
    run(runner, start(num_tokens=4))
    with pytest.raises(StepPlanError, match="too few blocks"):
        runner.launch(StepPlan(2, {"a": 1}, samples={"a"}))
    runner = make_runner()
    run(runner, start(num_tokens=4))
    run(runner, StepPlan(2, {"a": 1}, tables=[TableChanges({"a": [7]}, [("a", 0, 9)])], samples={"a"}))
    run(runner, StepPlan(3, {"a": 3}, released=["a", "unknown"], admitted=[row("a")], samples={"a"}))
    runner.close()


def test_equal_model_names_have_equal_digests() -> None:
    digests = [NullRunner.from_config(EngineConfig(model=name)).info.weights_digest for name in ("x", "x", "y")]
    assert digests[0] == digests[1] != digests[2]


def test_steps_run_one_after_the_other() -> None:
    """The second of two steps launched at once ends after both times; an idle device starts at once."""
    clock = Clock()
    runner = make_runner(clock)
    first = runner.launch(start(blocks=2))
    second = runner.launch(StepPlan(2, {"a": 1}, samples={"a"}))
    tokens = runner.wait(first).token_ids
    assert clock.now_s == pytest.approx(0.012)
    assert runner.wait(second).token_ids != tokens
    assert clock.now_s == pytest.approx(0.022)
    clock.now_s = 1.0
    runner.wait(runner.launch(StepPlan(3, {"a": 1}, samples={"a"})))
    assert clock.now_s == pytest.approx(1.01)


def test_a_step_waits_in_each_stage_for_the_one_before_it() -> None:
    """Times of the two stages: 0 to 30 and 30 to 60 for the first step; 30 to 40 and 60 to 70 for the second."""
    clock = Clock()
    runner = make_runner(clock, stages=2)
    long = runner.launch(start("a", num_tokens=21, blocks=6))
    short = runner.launch(StepPlan(2, {"b": 1}, admitted=[row("b", num_tokens=1)], samples={"b"}))
    runner.wait(long)
    assert clock.now_s == pytest.approx(0.06)
    following = runner.launch(StepPlan(3, {"a": 1}, samples={"a"}))
    runner.wait(short)
    assert clock.now_s == pytest.approx(0.07)
    runner.wait(following)  # 60 to 70 in the first stage
    assert clock.now_s == pytest.approx(0.08)


@pytest.mark.parametrize("caching", [False, True])
def test_a_prompt_is_computed_where_a_window_has_room_for_one_of_its_chunks_and_not_two(caching: bool) -> None:
    """The next chunk waits until the one in flight was read: then what its tokens have passed is free."""
    kinds = CacheKind(block_bytes=2), CacheKind("window", 40, block_bytes=3)
    config = EngineConfig(
        model="m",
        null_runner=True,
        simulated_kinds=SimulatedKinds(kinds, (400, 40)),
        max_num_batched_tokens=512,
        enable_prefix_caching=caching,
        overlap=True,
    )
    core = EngineCore(config, NullRunner.from_config(config, sleep=lambda seconds: None))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    core.add(GenerateRequest(request_id="r", model="m", prompt_token_ids=[1] * 1100, sampling=params))
    for _ in range(10):
        core.step()
        core.check_integrity()
    assert not core.has_work
    assert core.scheduler.num_preemptions == 0

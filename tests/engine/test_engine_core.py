"""The engine's loop (schedule, run, update), also when rows or whole steps fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.kv.integrity import IntegrityError
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import Calibration, SelfTestError, probe, self_test
from pagemill_execution.runners.null import DEFAULT_STEP_TIME, NullRunner
from pagemill_execution.step import StepPlan
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

Make = Callable[..., Any]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def checking_runner(checking_runner: Make, request: pytest.FixtureRequest) -> Make:
    """Return the checking device for both loops, which have the same rules."""

    def make(**settings: Any) -> Any:
        runner = checking_runner(**settings)
        runner.info = runner.info._replace(overlaps=request.param)
        return runner

    return make


def make_core(checking_runner: Make, **options: Any) -> EngineCore:
    runner = checking_runner(num_blocks=options.pop("num_blocks", 64))
    return EngineCore(EngineConfig(model="m", block_size=4, **options), runner)


def request(name: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "seed": 1, **sampling})
    return GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=params)


def finish(core: EngineCore) -> dict[str, list[TokensOut]]:
    outputs: dict[str, list[TokensOut]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def poison(token_id: int) -> Callable[[Any], bool]:
    """Return a device fault that occurs in every step with this token."""
    poisoned: set[str] = set()

    def breaks(plan: Any) -> bool:
        poisoned.update(row.request_id for row in plan.admitted if token_id in row.token_ids)
        return bool(poisoned & plan.num_scheduled_tokens.keys())

    return breaks


def test_an_idle_step_does_nothing(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    step = core.step()
    assert (step.outputs, step.num_step_tokens, core.has_work) == ([], 0, False)
    assert core.runner.plans == []


def test_requests_are_served_to_their_end(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(request("a", list(range(10))))
    core.add(request("b", list(range(6)), n=2))
    outputs = finish(core)
    assert sum(len(out.token_ids) for out in outputs["a"]) == 4
    assert outputs["a"][-1].finish_reason == "length"
    assert sorted(out.choice for out in outputs["b"] if out.finish_reason) == [0, 1]


def test_a_bad_request_is_found_and_the_others_finish(checking_runner: Make) -> None:
    clean = make_core(checking_runner)
    core = make_core(checking_runner)
    core.runner.raise_on = poison(666)
    for target in (clean, core):
        for index in range(5):
            target.add(request(f"r{index}", [index] * 9))
    core.step()
    core.add(request("bad", [1, 2, 666]))
    outputs, expected = finish(core), finish(clean)
    assert [out.error_status for out in outputs["bad"]] == [500]
    assert outputs["bad"][0].finish_reason == "error"
    assert "DeviceFault" in (outputs["bad"][0].error or "")
    for name, answers in expected.items():
        got = [token for out in outputs[name] for token in out.token_ids]
        assert got == [token for out in answers for token in out.token_ids][-len(got) :]
    assert core.num_failed_steps_in_a_row == 0


def test_a_transient_fault_fails_no_request(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    faults = iter([False, True])
    core.runner.raise_on = lambda plan: next(faults, False)
    for index in range(4):
        core.add(request(f"r{index}", [index] * 9))
    outputs = finish(core)
    assert all(out.error is None for answers in outputs.values() for out in answers)
    assert all(sum(len(out.token_ids) for out in answers) == 4 for answers in outputs.values())


def test_a_device_that_always_fails_ends_every_request_but_not_the_loop(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.runner.raise_on = lambda plan: True
    for index in range(3):
        core.add(request(f"r{index}", [index] * 9))
    outputs = finish(core)
    assert all(answers[-1].error is not None for answers in outputs.values())
    assert core.num_failed_steps_in_a_row == 4
    with pytest.raises(RuntimeError, match="made to fail"):
        probe(core)
    core.check_integrity()
    core.runner.raise_on = lambda plan: False
    probe(core)
    core.add(request("after", [1, 2, 3]))
    assert finish(core)["after"][-1].finish_reason == "length"


def test_an_abort_after_a_failed_step_takes_effect(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    faults = iter([True])
    core.runner.raise_on = lambda plan: next(faults, False)
    core.add(request("a", [1] * 9))
    core.add(request("b", [2] * 9))
    core.step()
    core.abort("a")
    outputs = finish(core)
    assert [out.finish_reason for out in outputs["a"]] == ["abort"]
    assert outputs["b"][-1].finish_reason == "length"


def test_an_interrupted_step_leaves_nothing_in_flight(checking_runner: Make) -> None:
    core = make_core(checking_runner)

    def interrupt(plan: Any) -> bool:
        raise KeyboardInterrupt

    core.runner.raise_on = interrupt
    core.add(request("a", [1] * 9))
    core.add(request("b", [2] * 9))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.check_integrity()
    core.abort("a")
    core.runner.raise_on = lambda plan: False
    outputs = finish(core)
    assert [out.finish_reason for out in outputs["a"]] == ["abort"]
    assert outputs["b"][-1].finish_reason == "length"


@pytest.mark.parametrize("call", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("kv", "commit"),
        ("_sequences.outputs", "tokens"),
        ("_sequences", "free"),
        ("_sequences", "fork_choices"),
    ],
)
def test_a_fault_while_a_step_is_processed_fails_its_requests_and_later_ones_are_served(
    checking_runner: Make, monkeypatch: pytest.MonkeyPatch, place: str, name: str, call: int
) -> None:
    core = make_core(checking_runner, max_num_seqs=3)
    for index in range(6):
        core.add(request(f"r{index}", [index] * 9, n=2))
    owner = attrgetter(place)(core.scheduler)
    sound, calls = getattr(owner, name), itertools.count(1)

    def broken(*args: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise ZeroDivisionError
        return sound(*args, **named)

    monkeypatch.setattr(owner, name, broken)
    outputs = finish(core)
    ends = [out for answers in outputs.values() for out in answers if out.finish_reason is not None]
    assert len(ends) == 12
    failed = [out for out in ends if out.finish_reason == "error"]
    assert len(failed) <= 6
    assert failed or name == "free"
    assert all(out.error is not None and "ZeroDivisionError" in out.error for out in failed)
    assert all(out.finish_reason == "length" for out in ends if out not in failed)
    assert (core.load().num_kv_bytes_active, core.num_failed_steps_in_a_row) == (0, 0)


def test_a_fault_while_a_step_is_planned_fails_the_requests_that_it_may_affect(
    checking_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(checking_runner)
    sound = core.scheduler.kv.match

    def broken(row: Any, limit_tokens: int | None) -> Any:
        if row.client_request_id == "bad":
            raise ZeroDivisionError
        return sound(row, limit_tokens)

    monkeypatch.setattr(core.scheduler.kv, "match", broken)
    core.add(request("bad", [1, 2, 3]))
    core.add(request("good", [1, 2, 3]))
    outputs = finish(core)
    assert [out.finish_reason for out in outputs["bad"]] == ["error"]
    assert outputs["good"][-1].finish_reason == "length"


def test_a_fault_that_damages_the_state_of_other_requests_ends_the_engine(
    checking_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(checking_runner)
    core.add(request("a", [1] * 9))
    core.step()
    core.add(request("b", [2] * 9))

    def broken(*args: Any) -> None:
        core.scheduler.kv.caches[0].pool.allocate(1)
        raise ZeroDivisionError

    monkeypatch.setattr(core.scheduler, "update", broken)
    with pytest.raises(IntegrityError, match="tables hold 0"):
        core.step()


def test_ctrl_c_while_a_step_is_processed_leaves_nothing_in_flight(
    checking_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(checking_runner)
    core.add(request("a", [1] * 9))
    sound, interrupts = core.scheduler.kv.commit, iter([KeyboardInterrupt()])

    def interrupted(*args: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        sound(*args)

    monkeypatch.setattr(core.scheduler.kv, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.add(request("b", [2] * 9))
    assert finish(core)["b"][-1].finish_reason == "length"


def test_end_tokens_outside_the_models_vocabulary_are_ignored(checking_runner: Make) -> None:
    core = make_core(checking_runner, eos_token_ids=[5, 1000])
    assert core.scheduler.limits.eos_token_ids == [5]


def test_prefix_events_add_up_to_the_snapshot(checking_runner: Make) -> None:
    core = make_core(checking_runner, num_blocks=40)
    core.runner.info = core.runner.info._replace(max_model_len=128)
    known: set[bytes] = set()
    for index in range(6):
        core.add(request(f"r{index}", [index] * 70))
        while core.has_work:
            prefixes = core.step().prefixes
            if prefixes is not None:
                known = (known | set(prefixes.added)) - set(prefixes.removed)
            assert known == set(core.scheduler.kv.snapshot())
    assert 1 <= len(known) <= 40, "of six prompts of 17 full blocks, some must be evicted"


def test_step_times_are_learned_and_published_periodically() -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    config = EngineConfig(model="m", null_runner=True, seed=1)
    core = EngineCore(config, NullRunner.from_config(config, clock=lambda: now_s, sleep=sleep), clock=lambda: now_s)
    core.add(request("a", [1] * 400, max_tokens=300))
    sent = 0
    while core.has_work:
        step = core.step()
        sent += step.step_time is not None
        assert step.load.step_ms > 0
    assert core.num_steps == 300
    assert sent == int(now_s / 0.5) + 1
    assert core.step_time.params().num_steps_observed == 300
    assert core.step_time.predict_ms(1, 600) == pytest.approx(6.0, rel=0.06)


@pytest.mark.parametrize("overlap", [False, True])
def test_under_load_a_steps_time_is_that_between_two_reads(overlap: bool) -> None:
    now_s = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    config = EngineConfig(model="m", null_runner=True, seed=1, overlap=overlap)
    core = EngineCore(config, NullRunner.from_config(config, clock=lambda: now_s, sleep=pass_by), clock=lambda: now_s)
    for number in (1, 2):
        core.add(request(f"r{number}", [*range(40 * number, 40 * number + 40)], max_tokens=5))
        took_ms = []
        while core.has_work:
            took_ms.append(core.step().load.step_ms)
            pass_by(0.002)
        pass_by(60.0)
        alone_ms = 6.0 if overlap else 8.0
        assert took_ms[0] == pytest.approx(7.2, abs=0.1), "neither the idle minute nor earlier time may count"
        assert took_ms[1:] == pytest.approx([alone_ms] * 4, abs=0.1)


@pytest.mark.parametrize("budget", [1, 8, 64, 500])
def test_warm_up_generates_a_token_measures_steps_and_leaves_no_state(checking_runner: Make, budget: int) -> None:
    core = make_core(checking_runner, max_num_batched_tokens=budget)
    self_test(core)
    Calibration(core).begin()
    knots = core.step_time.params().knots_tokens
    assert (knots[0], knots[-1]) == (1, min(budget, 127))
    assert core.step_time.predict_ms(budget) > 0
    assert not core.has_work
    assert core.scheduler.kv.snapshot() == []
    step = core.step()
    assert (step.prefixes, step.outputs) == (None, [])
    assert core.load().num_kv_bytes_evictable == 0


def test_larger_steps_are_measured_while_idle_until_the_first_request(checking_runner: Make) -> None:
    core = make_core(checking_runner, max_num_batched_tokens=100)
    calibration = Calibration(core)
    calibration.begin(limit_s=0)
    before = core.num_steps
    assert calibration.measure_next(), "one more size is measured"
    assert core.num_steps > before
    assert not core.has_work
    assert core.scheduler.kv.snapshot() == []
    core.add(request("r", [1, 2, 3], max_tokens=1))
    while core.has_work:
        core.step()
    after = core.num_steps
    assert not calibration.measure_next(), "from now on, requests are measured"
    assert core.num_steps == after


def test_measurements_end_with_the_largest_step(checking_runner: Make) -> None:
    core = make_core(checking_runner, max_num_batched_tokens=100)
    calibration = Calibration(core)
    calibration.begin(limit_s=0)
    found = [calibration.measure_next() for _ in range(8)]  # 16 decodes, and prompts of 8, 9, 32, 64 and 100 tokens
    assert found == [True] * 6 + [False] * 2


def test_warm_up_measures_the_additional_cost_of_decodes() -> None:
    """The engine has a large head, which only sampled tokens use."""
    head_ms = 0.02  # compared with 0.03 for a token
    now_s = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class WithHead(NullRunner):
        def launch(self, plan: StepPlan) -> Any:
            pass_by(head_ms * len(plan.samples) / 1000)
            return super().launch(plan)

    config = EngineConfig(model="m", null_runner=True, seed=1, overlap=False, max_num_batched_tokens=512)
    core = EngineCore(config, WithHead.from_config(config, clock=lambda: now_s, sleep=pass_by), clock=lambda: now_s)
    Calibration(core).begin(limit_s=60.0)
    without_head = StepTimeModel.from_params(DEFAULT_STEP_TIME)
    for decodes in (1, 8, 16, 32):
        truth_ms = without_head.predict_ms(decodes) + head_ms * decodes
        assert core.step_time.predict_ms(decodes) == pytest.approx(truth_ms, rel=0.005)
    for prompt in (64, 512):
        assert core.step_time.predict_ms(prompt) == pytest.approx(without_head.predict_ms(prompt) + head_ms, rel=0.005)
    assert not core.has_work


@pytest.mark.parametrize("stalled", [1, 16])
def test_a_first_step_without_the_processor_does_not_make_all_steps_look_slow(stalled: int) -> None:
    now_s = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Stalling(NullRunner):
        stalls = 1

        def launch(self, plan: StepPlan) -> Any:
            if plan.num_tokens == stalled and self.stalls:
                self.stalls -= 1
                pass_by(3.0)
            return super().launch(plan)

    config = EngineConfig(model="m", null_runner=True, seed=1, overlap=False, max_num_batched_tokens=512)
    core = EngineCore(config, Stalling.from_config(config, clock=lambda: now_s, sleep=pass_by), clock=lambda: now_s)
    Calibration(core).begin(limit_s=0.0)
    truth = StepTimeModel.from_params(DEFAULT_STEP_TIME)
    for size in (1, 16, 512):
        assert core.step_time.predict_ms(size) == pytest.approx(truth.predict_ms(size), rel=0.1)


def test_the_self_test_fails_if_no_token_is_generated(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.runner.raise_on = lambda plan: True
    with pytest.raises(SelfTestError, match="DeviceFault"):
        self_test(core)


def test_the_self_test_fails_on_a_token_outside_the_vocabulary(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    wait = core.runner.wait

    def beyond(handle: Any) -> Any:
        result = wait(handle)
        result.token_ids = {key: [1000] for key in result.token_ids}
        return result

    core.runner.wait = beyond
    with pytest.raises(SelfTestError, match="1000"):
        self_test(core)


# -- allowances --------------------------------------------------------------------------------------------------------


def limited(name: str, allowance: int, **sampling: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(name, list(range(10)), **sampling), token_allowance=allowance)


def num_tokens(outputs: list[TokensOut]) -> int:
    return sum(len(out.token_ids) for out in outputs)


def test_an_allowance_ends_every_sequence_with_reason_length(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(limited("a", 3, n=2, max_tokens=8))
    core.add(limited("b", 9, max_tokens=4, min_tokens=4))
    core.add(limited("c", 2, n=2, use_beam_search=True, max_tokens=8))
    outputs = finish(core)
    assert num_tokens(outputs["a"]) == 2 * 3
    assert num_tokens(outputs["b"]) == 4
    assert num_tokens(outputs["c"]) == 2 * 2
    assert {out.finish_reason for name in "abc" for out in outputs[name]} == {None, "length"}


@pytest.mark.parametrize("num_steps", range(4))
def test_an_allowance_can_be_raised_up_to_the_requests_own_limit(checking_runner: Make, num_steps: int) -> None:
    unlimited, core = make_core(checking_runner), make_core(checking_runner)
    unlimited.add(request("a", list(range(10)), n=2, max_tokens=9))
    core.add(limited("a", 4, n=2, max_tokens=9))
    outputs = [out for _ in range(num_steps) for out in core.step().outputs]
    core.scheduler.raise_allowance("a", 6)
    core.scheduler.raise_allowance("a", 2)
    core.scheduler.raise_allowance("unknown", 6)
    outputs += [out for _ in range(2) for out in core.step().outputs]
    core.scheduler.raise_allowance("a", 100)
    outputs += finish(core).get("a", [])
    assert num_tokens(outputs) == 2 * 9
    tokens = {choice: [out.token_ids for out in outputs if out.choice == choice] for choice in (0, 1)}
    expected = finish(unlimited)["a"]
    assert tokens == {choice: [out.token_ids for out in expected if out.choice == choice] for choice in (0, 1)}


def test_an_allowance_that_arrives_too_late_has_no_effect(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(limited("a", 2, max_tokens=9))
    outputs = finish(core)["a"]
    core.scheduler.raise_allowance("a", 9)
    assert num_tokens(outputs) == 2
    assert not core.has_work


def test_an_allowance_includes_the_tokens_that_another_engine_has_generated(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    resumed = msgspec.structs.replace(limited("a", 5, max_tokens=9), resume=[ChoiceResume(0, [1, 2, 3], 0)])
    core.add(resumed)
    core.add(msgspec.structs.replace(resumed, request_id="b", token_allowance=3))
    outputs = finish(core)
    assert num_tokens(outputs["a"]) == 2
    assert [(out.token_ids, out.finish_reason) for out in outputs["b"]] == [([], "length")]


def test_an_allowance_of_zero_is_refused(checking_runner: Make) -> None:
    with pytest.raises(PagemillError, match="token_allowance must be at least 1"):
        make_core(checking_runner).add(limited("a", 0))

"""Step N+1 is launched before the tokens of step N are read, and the answers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import AddRequest, Shutdown, TokensOut
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.process import EngineLoop
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

Make = Callable[..., Any]


def make_core(checking_runner: Make, *, overlap: bool = True, num_blocks: int = 64, **options: Any) -> EngineCore:
    runner = checking_runner(num_blocks=num_blocks)
    return EngineCore(EngineConfig(model="m", block_size=4, overlap=overlap, **options), runner)


def request(name: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 1, **sampling})
    return GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=params)


def collect(core: EngineCore, num_steps: int | None = None) -> dict[str, list[TokensOut]]:
    """Return the outputs of the next steps, by default until the end."""
    outputs: dict[str, list[TokensOut]] = {}
    while core.has_work and num_steps != 0:
        num_steps = None if num_steps is None else num_steps - 1
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def tokens(outputs: list[TokensOut]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def alone(checking_runner: Make, wanted: GenerateRequest) -> list[int]:
    core = make_core(checking_runner, overlap=False, enable_prefix_caching=False)
    core.add(wanted)
    return tokens(collect(core)[wanted.request_id])


def assert_clean(core: EngineCore) -> None:
    load = core.load()
    assert (load.num_kv_bytes_active, load.num_requests_running, load.num_requests_waiting) == (0, 0, 0)
    assert (load.num_tokens_waiting, core.has_work, core.step().outputs) == (0, False, [])


# -- order -------------------------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(request("a", [1] * 9, max_tokens=5))
    collect(core)
    first, last = 1, 5
    order = [("launch", first)]
    for step in range(first, last):
        order += [("launch", step + 1), ("wait", step)]
    assert core.runner.trace == [*order, ("wait", last)]


def test_the_plain_loop_has_one_step_in_flight(checking_runner: Make) -> None:
    core = make_core(checking_runner, overlap=False)
    core.add(request("a", [1] * 9, max_tokens=5))
    collect(core)
    assert core.runner.trace == [(call, step) for step in range(1, 6) for call in ("launch", "wait")]


def test_the_runner_declares_whether_it_overlaps_and_the_setting_overrides_it(checking_runner: Make) -> None:
    for preference in (False, True):
        runner = checking_runner()
        runner.info = runner.info._replace(overlaps=preference)
        for setting in (None, False, True):
            core = EngineCore(EngineConfig(model="m", block_size=4, overlap=setting), runner)
            assert core.overlaps == (preference if setting is None else setting)


class TracingLink:
    """A connection that records in the device's trace when outputs are sent."""

    def __init__(self, trace: list[Any], messages: list[Any]) -> None:
        self.trace, self.messages = trace, messages

    def receive(self, timeout_s: float | None) -> Any:
        if self.messages:
            return self.messages.pop(0)
        return Shutdown() if timeout_s else None

    def send(self, message: Any) -> None:
        if message.outputs:
            self.trace.append(("send", len(message.outputs)))


def test_the_outputs_of_a_step_are_sent_while_the_next_one_runs(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    trace = core.runner.trace
    EngineLoop(core, TracingLink(trace, [AddRequest(request("a", [1] * 5, max_tokens=3))])).run()  # type: ignore[arg-type]
    launched_2, read_1, launched_3 = (trace.index(call) for call in [("launch", 2), ("wait", 1), ("launch", 3)])
    assert launched_2 < read_1 < trace.index(("send", 1)) < launched_3 < trace.index(("wait", 2))


# -- overshoot ---------------------------------------------------------------------------------------------------


def test_a_row_at_its_limit_is_not_launched_again(checking_runner: Make) -> None:
    counts = {}
    for overlap in (False, True):
        core = make_core(checking_runner, overlap=overlap)
        core.add(request("a", [1] * 9, max_tokens=5))
        core.add(request("b", [2] * 9, max_tokens=1))
        collect(core)
        plans = core.runner.plans
        counts[overlap] = Counter(name for plan in plans for name in plan.num_scheduled_tokens)
    assert counts[True] == counts[False] == {"a/0": 5, "b/0": 1}


def test_tokens_computed_after_a_stop_token_are_not_delivered(checking_runner: Make) -> None:
    """The stop token is the last of a block: only the overshoot writes its KV, so the block is not cached."""
    prompt = [1, 2, 3, 4, 5]
    unbounded = alone(checking_runner, request("a", prompt))
    stop = next(index for index in (2,) if unbounded[index] not in unbounded[:index])
    cached = {}
    for overlap in (False, True):
        core = make_core(checking_runner, overlap=overlap)
        core.add(request("a", prompt, stop_token_ids=[unbounded[stop]]))
        core.add(request("b", [9] * 5, max_tokens=12))
        outputs = collect(core)
        assert tokens(outputs["a"]) == unbounded[: stop + 1]
        assert [out.finish_reason for out in outputs["a"]] == [None, None, "stop"]
        assert tokens(outputs["b"]) == alone(checking_runner, request("b", [9] * 5, max_tokens=12))
        scheduled = [plan.step for plan in core.runner.plans if "a/0" in plan.num_scheduled_tokens]
        assert len(scheduled) == stop + 1 + overlap
        cached[overlap] = {block_hash for block_hash, _ in core.scheduler.kv.caches[0].prefixes.items()}
        assert_clean(core)
    assert cached[True] == cached[False]


def test_the_last_step_may_consist_of_overshoot_only(checking_runner: Make) -> None:
    unbounded = alone(checking_runner, request("a", [1, 2, 3]))
    core = make_core(checking_runner)
    core.add(request("a", [1, 2, 3], stop_token_ids=unbounded[:1]))
    assert tokens(collect(core, 1)["a"]) == unbounded[:1]
    assert core.load().num_requests_running == 0
    assert core.has_work
    assert collect(core) == {}
    assert_clean(core)


def test_an_id_that_is_reused_at_once_gets_nothing_of_the_overshoot(checking_runner: Make) -> None:
    unbounded = alone(checking_runner, request("a", [1, 2, 3]))
    core = make_core(checking_runner)
    core.add(request("a", [1, 2, 3], stop_token_ids=unbounded[:1]))
    collect(core, 1)
    again = request("a", [7, 8, 9, 10, 11])
    core.add(again)
    core.abort("a")
    assert [out.finish_reason for out in collect(core, 1)["a"]] == ["abort"]
    core.add(again)
    assert tokens(collect(core)["a"]) == alone(checking_runner, again)
    assert_clean(core)


def test_an_abort_ends_a_row_although_a_step_is_in_flight(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(request("a", [1] * 9, max_tokens=50))
    core.add(request("b", [2] * 9))
    before = collect(core, 2)
    core.abort("a")
    num_plans = len(core.runner.plans)
    after = collect(core)
    assert [out.finish_reason for out in after["a"]] == ["abort"]
    assert after["a"][0].token_ids == []
    assert all("a/0" not in plan.num_scheduled_tokens for plan in core.runner.plans[num_plans:])
    assert tokens(before["b"]) + tokens(after["b"]) == alone(checking_runner, request("b", [2] * 9))
    assert_clean(core)


# -- failures with a following step ------------------------------------------------------------------------------


def test_a_failed_row_is_reported_once_although_the_next_step_contains_it(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.runner.fail_rows = lambda plan: {
        name: "not finite" for name in plan.num_scheduled_tokens if name == "bad/0" and plan.step >= 3
    }
    core.add(request("bad", [1] * 9))
    core.add(request("good", [2] * 9))
    outputs = collect(core)
    assert [out.finish_reason for out in outputs["bad"]] == [None, None, "error"]
    assert sum("bad/0" in plan.num_scheduled_tokens for plan in core.runner.plans) == 4
    assert tokens(outputs["good"]) == alone(checking_runner, request("good", [2] * 9))
    assert_clean(core)


def test_readers_of_a_failed_rows_blocks_in_the_next_step_start_over(checking_runner: Make) -> None:
    core = make_core(checking_runner, max_num_batched_tokens=15)
    prompt = list(range(15))
    core.runner.fail_rows = lambda plan: {"writer/0": "not finite"} if plan.step == 1 else {}
    core.add(request("writer", prompt))
    reader = request("reader", [*prompt[:12], 77])
    core.add(reader)
    outputs = collect(core)
    first, second = core.runner.plans[:2]
    assert "reader/0" not in first.num_scheduled_tokens
    assert [row.num_computed_tokens for row in second.admitted] == [12]
    assert [out.finish_reason for out in outputs["writer"]] == ["error"]
    assert tokens(outputs["reader"]) == alone(checking_runner, reader)
    assert max(out.num_preemptions for out in outputs["reader"]) == 1
    assert_clean(core)


def test_a_reader_starts_over_even_if_the_failed_row_was_already_preempted(checking_runner: Make) -> None:
    core = make_core(checking_runner, num_blocks=9)
    core.runner.fail_rows = lambda plan: {"writer/0": "not finite"} if plan.step == 3 else {}
    core.add(request("old", [9] * 6, max_tokens=9))
    before = collect(core, 1)
    prompt = list(range(16))
    reader = request("reader", [*prompt[:12], 77, 78, 79, 80])
    core.add(msgspec.structs.replace(request("writer", prompt), priority=5))
    core.add(reader)
    after = collect(core)
    third, fourth = core.runner.plans[2:4]
    assert [(row.request_id, row.num_computed_tokens) for row in third.admitted] == [("writer/0", 0), ("reader/0", 12)]
    assert "writer/0" in fourth.released
    assert [out.finish_reason for out in after["writer"]] == ["error"]
    assert tokens(after["reader"]) == alone(checking_runner, reader)
    assert len(tokens(before["old"]) + tokens(after["old"])) == 9
    assert_clean(core)


@pytest.mark.parametrize("budget", [3, 64])
def test_choices_share_the_prompt_of_the_first_choice(checking_runner: Make, budget: int) -> None:
    """The first choice waits for one step, so that no row writes into the block from which the others fork."""
    core = make_core(checking_runner, enable_prefix_caching=False, max_num_batched_tokens=budget)
    core.add(request("a", list(range(10)), n=3))
    collect(core)
    forked = [row for plan in core.runner.plans for row in plan.admitted if row.request_id != "a/0"]
    assert [row.num_computed_tokens for row in forked] == [9, 9]
    assert sum(len(plan.tables[0].copies) for plan in core.runner.plans) == 2


@pytest.mark.parametrize("where", ["step", "launch"])
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_step_that_raises_costs_only_time(checking_runner: Make, failing: int, where: str) -> None:
    """The following step is discarded, whatever it returned."""
    core = make_core(checking_runner)
    wanted = [request(f"r{index}", [index] * 9, n=1 + index % 2) for index in range(4)]
    faults = Counter([failing])
    core.runner.raise_on = lambda plan: where == "step" and faults[plan.step] > 0
    launch = core.runner.launch

    def broken_launch(plan: Any) -> Any:
        if where == "launch" and faults[plan.step]:
            raise RuntimeError("made to fail")
        return launch(plan)

    core.runner.launch = broken_launch
    for each in wanted:
        core.add(each)
    outputs = collect(core)
    for each in wanted:
        assert all(out.error is None for out in outputs[each.request_id])
        if each.sampling.n == 1:
            assert tokens(outputs[each.request_id]) == alone(checking_runner, each)
        assert len(tokens(outputs[each.request_id])) == 6 * each.sampling.n
    assert core.num_failed_steps_in_a_row == 0
    assert_clean(core)


def test_a_row_that_raises_alone_fails_and_the_next_step_starts_over(checking_runner: Make) -> None:
    core = make_core(checking_runner, max_num_batched_tokens=8)
    core.runner.raise_on = lambda plan: list(plan.num_scheduled_tokens) == ["bad/0"]
    core.add(request("bad", [1] * 8))
    core.add(request("good", [2] * 7))
    outputs = collect(core)
    assert [set(plan.num_scheduled_tokens) for plan in core.runner.plans[:2]] == [{"bad/0"}, {"bad/0", "good/0"}]
    assert [out.finish_reason for out in outputs["bad"]] == ["error"]
    assert tokens(outputs["good"]) == alone(checking_runner, request("good", [2] * 7))
    assert_clean(core)


def test_a_step_that_raises_with_an_overshooting_row_fails_no_row_without_a_probe(checking_runner: Make) -> None:
    """One of the step's two rows had ended with the step before, so the other one did not run alone."""
    stop = alone(checking_runner, request("bad", [1, 2, 3]))[0]
    core = make_core(checking_runner)
    core.runner.raise_on = lambda plan: plan.step == 2
    core.add(request("bad", [1, 2, 3], stop_token_ids=[stop]))
    good = request("good", [9] * 5)
    core.add(good)
    outputs = collect(core)
    assert [set(plan.num_scheduled_tokens) for plan in core.runner.plans[:2]] == [{"bad/0", "good/0"}] * 2
    assert [out.finish_reason for out in outputs["bad"]] == ["stop"]
    assert tokens(outputs["good"]) == alone(checking_runner, good)
    assert_clean(core)


def test_probed_requests_run_one_by_one_without_other_steps_in_flight(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.runner.raise_on = lambda plan: plan.step == 2
    for index in range(3):
        core.add(request(f"r{index}", [index] * 9))
    collect(core)
    calls = core.runner.trace
    cleared = [plan.step for plan in core.runner.plans if plan.step > 3 and len(plan.num_scheduled_tokens) == 1][:3]
    for step in cleared:
        assert calls[calls.index(("launch", step)) + 1] == ("wait", step)
    assert_clean(core)


def test_ctrl_c_leaves_nothing_in_flight(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(request("a", [1] * 9))
    core.add(request("b", [2] * 9))
    before = collect(core, 2)
    wait = core.runner.wait

    def interrupt(handle: Any) -> Any:
        core.runner.wait = wait
        raise KeyboardInterrupt

    core.runner.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.check_integrity()
    core.abort("a")
    after = collect(core)
    assert [out.finish_reason for out in after["a"]] == ["abort"]
    assert tokens(before["b"]) + tokens(after["b"]) == alone(checking_runner, request("b", [2] * 9))
    assert_clean(core)


# -- a full cache ------------------------------------------------------------------------------------------------


def pressing(index: int) -> GenerateRequest:
    prompt = [index % 3] * (4 + index % 7) + [index] * (index % 4)
    return request(f"r{index}", prompt, max_tokens=8 + index % 9, n=1 + (index % 5 == 0), seed=index)


@pytest.mark.parametrize("oversubscription", [1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_both_loops_give_the_same_answers_with_a_full_cache(
    checking_runner: Make, oversubscription: int, caching: bool
) -> None:
    """The running rows need up to `oversubscription` times the available blocks."""
    wanted = [pressing(index) for index in range(16)]
    most_blocks = 12 * 7
    answers, preemptions = {}, {}
    for overlap in (False, True):
        core = make_core(
            checking_runner,
            overlap=overlap,
            num_blocks=most_blocks // oversubscription,
            max_num_seqs=12,
            max_num_batched_tokens=24,
            enable_prefix_caching=caching,
        )
        for each in wanted:
            core.add(each)
        ended: dict[tuple[str, int], list[int]] = {}
        for outputs in collect(core).values():
            for out in outputs:
                ended.setdefault((out.request_id, out.choice), []).extend(out.token_ids)
        answers[overlap], preemptions[overlap] = ended, core.scheduler.num_preemptions
        assert_clean(core)
    assert answers[True] == answers[False]
    assert preemptions[True] == 0 if oversubscription == 1 else preemptions[True] > 0 or oversubscription == 2


def test_the_token_in_flight_of_a_preempted_row_counts(checking_runner: Make) -> None:
    """No answer loses tokens: the token of the step in flight is discarded and computed again."""
    core = make_core(checking_runner, num_blocks=6, enable_prefix_caching=False)
    wanted = [request(name, [first] * 7, max_tokens=14) for name, first in (("old", 1), ("new", 2))]
    for each in wanted:
        core.add(each)
    outputs = collect(core)
    assert core.scheduler.num_preemptions > 0
    assert any(
        admitted.request_id == "new/0" and len(admitted.token_ids) > 7
        for plan in core.runner.plans
        for admitted in plan.admitted
    )
    for each in wanted:
        assert tokens(outputs[each.request_id]) == alone(checking_runner, each)

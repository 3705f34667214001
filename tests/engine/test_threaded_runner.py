"""A runner that works in `launch` gets a thread of its own: launches return at once, and steps keep their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.runners.errors import StepSkippedError
from pagemill_execution.step import StepPlan, StepResult
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


class WorkingRunner:
    """A runner that works in `launch` until the gate opens."""

    def __init__(self) -> None:
        self.info = RunnerInfo(8, 4, 32, 100, "weights", "kv", 0, 0, "none")
        self.gate = threading.Event()
        self.done: list[int] = []
        self.threads: set[str] = set()
        self.broken: set[int] = set()

    def launch(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(WAIT_LIMIT_S)
        if plan.step in self.broken:
            raise ZeroDivisionError
        self.done.append(plan.step)
        return StepResult(token_ids={"a": [plan.step]})

    def wait(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        self.done.append(-1)


@pytest.fixture
def inner() -> WorkingRunner:
    return WorkingRunner()


@pytest.fixture
def prepared() -> list[str]:
    return []


@pytest.fixture
def runner(inner: WorkingRunner, prepared: list[str]) -> Iterator[ThreadedRunner]:
    runner = ThreadedRunner(inner, lambda: prepared.append(threading.current_thread().name))
    yield runner
    inner.gate.set()
    runner.close()


def plan(step: int) -> StepPlan:
    return StepPlan(step, {"a": 1})


def test_launch_returns_before_the_step_has_run_and_steps_keep_their_order(
    runner: ThreadedRunner, inner: WorkingRunner, prepared: list[str]
) -> None:
    handles = [runner.launch(plan(step)) for step in (1, 2)]
    assert inner.done == []
    inner.gate.set()
    assert [runner.wait(handle).token_ids["a"] for handle in handles] == [[1], [2]]
    assert inner.done == [1, 2]
    assert prepared == list(inner.threads)
    assert threading.current_thread().name not in inner.threads


def test_a_threaded_runner_declares_that_it_overlaps(runner: ThreadedRunner, inner: WorkingRunner) -> None:
    assert runner.info == inner.info._replace(overlaps=True)


def test_a_step_after_one_that_raised_does_not_run_and_the_next_one_does(
    runner: ThreadedRunner, inner: WorkingRunner
) -> None:
    inner.broken = {1}
    handles = [runner.launch(plan(step)) for step in (1, 2)]
    inner.gate.set()
    with pytest.raises(ZeroDivisionError):
        runner.wait(handles[0])
    with pytest.raises(StepSkippedError):
        runner.wait(handles[1])
    assert runner.wait(runner.launch(plan(3))).token_ids == {"a": [3]}
    assert inner.done == [3]


def test_the_inner_runner_is_closed_when_no_step_runs_any_more(runner: ThreadedRunner, inner: WorkingRunner) -> None:
    inner.gate.set()
    for step in (1, 2):
        runner.launch(plan(step))
    runner.close()
    assert inner.done[-1] == -1
    with pytest.raises(RuntimeError):
        runner.launch(plan(3))


def test_answers_with_and_without_the_thread_are_equal(checking_runner: Callable[..., Any]) -> None:
    answers = []
    for wrap in (lambda each: each, lambda each: ThreadedRunner(each, lambda: None)):
        core = EngineCore(EngineConfig(model="m", block_size=4), wrap(checking_runner(num_blocks=12)))
        for index in range(6):
            sampling = SamplingParams(max_tokens=9, ignore_eos=True, seed=index)
            core.add(
                GenerateRequest(request_id=f"r{index}", model="m", prompt_token_ids=[index] * 7, sampling=sampling)
            )
        outputs: dict[str, list[int]] = {}
        while core.has_work:
            for output in core.step().outputs:
                assert output.error is None
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
        core.check_integrity()
        core.runner.close()
        answers.append(outputs)
    assert answers[0] == answers[1]
    assert all(len(token_ids) == 9 for token_ids in answers[0].values())

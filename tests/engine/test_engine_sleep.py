"""Sleep in the engine: the state that the core drops, the state that a device keeps, and the order of messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.channels import EngineChannel
from pagemill_engine.ipc.messages import AddRequest, Awake, Ready, Sleep, Slept, StepOutputs, TokensOut, Wake
from pagemill_engine.ipc.process import EngineProcess
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.process import EngineFault, EngineLoop, release_memory
from pagemill_execution.runners.null import NullRunner, StepPlanError
from pagemill_execution.runners.sleep import SleepError
from pagemill_execution.step import StepPlan
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

Make = Callable[..., Any]
FAST = StepTimeParams(knots_tokens=[1, 512], knot_ms=[1.0, 2.0])
CONFIG = EngineConfig(model="null", null_runner=True, seed=1, step_time=FAST, max_num_seqs=4)


def request(name: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "seed": 1, **sampling})
    return GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=params)


def generate(core: EngineCore, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """Return the generated tokens, and the number of cached tokens of the prompt."""
    core.add(request(name, prompt))
    tokens, num_cached = [], 0
    while core.has_work:
        for output in core.step().outputs:
            tokens += output.token_ids
            num_cached = max(num_cached, output.num_cached_tokens)
    return tokens, num_cached


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def core(checking_runner: Make, request: pytest.FixtureRequest) -> EngineCore:
    runner = checking_runner(num_blocks=64)
    runner.info = runner.info._replace(overlaps=request.param)
    return EngineCore(EngineConfig(model="m", block_size=4), runner)


def test_after_sleep_no_token_is_cached_and_every_answer_is_the_same(core: EngineCore) -> None:
    prompt = list(range(100, 200))
    before, _ = generate(core, "a", prompt)
    again, num_cached = generate(core, "b", prompt)
    assert again == before
    assert num_cached > 0
    cached = set(core.scheduler.kv.snapshot())
    core.step()  # the changes of the prefix cache
    _, news = release_memory(core)
    assert news.prefixes is not None
    assert set(news.prefixes.removed) == cached
    assert core.scheduler.kv.snapshot() == []
    assert core.load().num_kv_bytes_active == core.load().num_kv_bytes_evictable == 0
    core.runner.wake()
    core.check_integrity()
    assert generate(core, "c", prompt) == (before, 0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
def test_sleep_between_requests_never_changes_answers(rounds: list[tuple[int, bool]]) -> None:
    core = EngineCore(CONFIG, NullRunner.from_config(CONFIG, sleep=lambda seconds: None))
    prompts = [list(range(start, start + 70)) for start in (0, 30, 500)]
    expected: dict[int, list[int]] = {}
    for number, (which, sleeps) in enumerate(rounds):
        tokens, _ = generate(core, f"r{number}", prompts[which])
        assert expected.setdefault(which, tokens) == tokens
        if sleeps:
            release_memory(core)
            core.runner.wake()
        core.check_integrity()


def test_no_step_runs_on_a_sleeping_device() -> None:
    runner = NullRunner.from_config(CONFIG)
    runner.sleep()
    with pytest.raises(StepPlanError, match="sleeps"):
        runner.launch(StepPlan(step=1, num_scheduled_tokens={}))


class Link:
    """A connection that returns the given messages and then stops the loop by raising."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None) -> Any:
        if self._messages:
            return self._messages.pop(0)
        if timeout_s:
            raise KeyboardInterrupt
        return None

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def run(core: EngineCore, *messages: Any) -> Link:
    link = Link(*messages)
    with pytest.raises(KeyboardInterrupt):
        EngineLoop(core, link).run()  # type: ignore[arg-type]
    return link


def test_the_loop_sleeps_after_its_requests_and_wakes_with_a_self_test(core: EngineCore) -> None:
    link = run(core, AddRequest(request("a", [1, 2, 3])), Sleep())
    tokens = [token for step in link.of(StepOutputs) for output in step.outputs for token in output.token_ids]
    assert len(tokens) == 4
    assert link.sent.index(link.of(Slept)[0]) > max(
        index for index, message in enumerate(link.sent) if isinstance(message, StepOutputs) and message.outputs
    )


def test_a_wake_before_a_pending_sleep_keeps_the_engine_awake(core: EngineCore) -> None:
    link = run(core, AddRequest(request("a", [1, 2, 3])), Sleep(), Wake())
    assert link.of(Slept) == []
    assert link.of(Awake) == [Awake(0.0)]


def test_a_request_to_a_sleeping_engine_is_refused(core: EngineCore) -> None:
    loop, link = EngineLoop(core, Link()), Link()  # type: ignore[arg-type]
    loop._link = link  # type: ignore[assignment]
    loop._handle(Sleep())
    loop._sleep()
    loop._handle(AddRequest(request("late", [1, 2, 3])))
    (refused,) = loop._refused
    assert (refused.error_status, refused.error_code) == (503, "not_ready")
    loop._handle(Wake())
    assert link.of(Awake)[0].wake_s > 0
    assert not core.has_work


def test_without_host_memory_the_engine_stays_awake(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise SleepError("no room")

    monkeypatch.setattr(core.runner, "sleep", refuse)
    link = run(core, Sleep(), AddRequest(request("a", [1, 2, 3])))
    assert link.of(Slept) == [Slept(fault="no room")]
    assert any(output.finish_reason == "length" for step in link.of(StepOutputs) for output in step.outputs)


def test_an_engine_that_cannot_wake_reports_the_reason_and_ends(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(core.runner, "wake", fail)
    loop = EngineLoop(core, Link(Sleep()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    with pytest.raises(EngineFault, match="out of memory") as fault:
        loop._handle(Wake())
    assert fault.value.reason == "WakeFailed"


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[EngineChannel]:
    channel = EngineChannel(CONFIG, EngineProcess.launch(CONFIG))
    await channel.start()
    try:
        yield channel
    finally:
        await channel.close()


async def until(channel: EngineChannel, kind: type) -> tuple[Any, list[TokensOut]]:
    outputs: list[TokensOut] = []
    while True:
        message = await asyncio.wait_for(channel.recv(), 60)
        if isinstance(message, StepOutputs):
            outputs += message.outputs
        if isinstance(message, kind):
            return message, outputs


async def test_the_process_sleeps_sends_heartbeats_and_works_after_waking() -> None:
    async with started() as channel:
        await until(channel, Ready)
        channel.send(AddRequest(request("a", [1, 2, 3], max_tokens=20)))
        channel.send(Sleep())
        _, outputs = await until(channel, Slept)
        assert outputs[-1].finish_reason == "length"
        await until(channel, StepOutputs)  # the heartbeat that it sends every second
        channel.send(Wake())
        awake, _ = await until(channel, Awake)
        assert awake.wake_s > 0
        channel.send(AddRequest(request("b", [1, 2, 3], max_tokens=20)))
        channel.send(Sleep())
        _, outputs = await until(channel, Slept)
        assert outputs[-1].finish_reason == "length"

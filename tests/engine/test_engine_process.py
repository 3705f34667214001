"""The engine process starts, answers, refuses and stops; its death is noticed, and it never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
import zmq
from hung_processes import hang
from waiting import START_LIMIT_S, WAIT_LIMIT_S, eventually

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc import channels
from pagemill_engine.ipc import process as process_module
from pagemill_engine.ipc.channels import EngineChannel, EngineDied
from pagemill_engine.ipc.messages import (
    Abort,
    AddRequest,
    Fatal,
    Heartbeat,
    LoadProgress,
    Ready,
    Shutdown,
    StepOutputs,
    TokensOut,
)
from pagemill_engine.ipc.process import EngineProcess
from pagemill_engine.kv.integrity import IntegrityError
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.process import EngineFault, EngineLoop, fatal_of, serve
from pagemill_engine.loop.warmup import SelfTestError
from pagemill_execution.runners.errors import DeviceLostError
from pagemill_execution.starting import factory
from pagemill_execution.starting.factory import LoadError
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.source_errors import UnreadableModelError

FAST = StepTimeParams(knots_tokens=[1, 512], knot_ms=[1.0, 2.0])
CONFIG = EngineConfig(model="null", null_runner=True, seed=1, max_num_waiting=8, step_time=FAST, max_num_seqs=4)


def request(name: str, num_tokens: int = 3, **sampling: Any) -> AddRequest:
    params = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **sampling})
    return AddRequest(
        GenerateRequest(
            request_id=name, model="m", prompt_token_ids=[index % 1000 for index in range(num_tokens)], sampling=params
        )
    )


class LateSocket:
    """A socket that has no connection at first."""

    def __init__(self, num_refused: int) -> None:
        self.closed = False
        self.num_refused = num_refused
        self.sent: list[bytes] = []

    def send(self, data: bytes, flags: int) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise zmq.Again
        self.sent.append(data)


async def test_messages_sent_before_the_engine_process_connects_arrive_in_order() -> None:
    channel, socket = EngineChannel(CONFIG, cast(Any, None)), LateSocket(3)
    channel._outbox = cast(Any, socket)
    messages = [Abort(request_id=str(number)) for number in range(4)]
    for message in messages:
        channel.send(message)
    await eventually(lambda: len(socket.sent) == len(messages))
    assert [msgspec.msgpack.decode(each, type=Abort) for each in socket.sent] == messages


def test_nothing_slow_is_imported_before_the_engine_process_starts() -> None:
    code = (
        "import sys, pagemill_engine.ipc.process, pagemill_engine.server.settings, pagemill_engine.failure\n"
        "assert not {'torch', 'numpy', 'zmq', 'uvicorn', 'starlette', 'tokenizers', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_engine_process_handles_neither_text_nor_json() -> None:
    """The HTTP process detokenizes, finds stop strings and renders, so that none of it delays a step."""
    code = (
        "import sys, pagemill_engine.loop.process, pagemill_execution.starting.load_cpu; "
        "texts = ('pagemill_engine.output', 'pagemill_engine.server', 'pagemill_api.text', "
        "'pagemill_api.openai', 'tokenizers', 'starlette', 'uvicorn', 'pydantic'); "
        "assert not [name for name in sys.modules if name.startswith(texts)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@contextlib.asynccontextmanager
async def started(config: EngineConfig = CONFIG) -> AsyncIterator[EngineChannel]:
    channel = EngineChannel(config, EngineProcess.launch(config))
    await channel.start()
    try:
        yield channel
    finally:
        await channel.close()


async def until_ready(channel: EngineChannel) -> tuple[Ready, list[LoadProgress]]:
    progress = []
    while True:
        message = await channel.recv()
        if isinstance(message, Ready):
            return message, progress
        if isinstance(message, Heartbeat):  # a slow machine loads for longer than a period
            continue
        assert isinstance(message, LoadProgress)
        progress.append(message)


async def read_to_death(channel: EngineChannel, messages: list[Any] | None = None) -> None:
    while True:
        message = await asyncio.wait_for(channel.recv(), START_LIMIT_S)  # imported before everything else
        if messages is not None:
            messages.append(message)


async def next_report(channel: EngineChannel) -> StepOutputs:
    while isinstance(message := await asyncio.wait_for(channel.recv(), WAIT_LIMIT_S), Heartbeat):
        pass
    assert isinstance(message, StepOutputs)
    return message


async def outputs_of(channel: EngineChannel, num_ends: int) -> list[TokensOut]:
    outputs: list[TokensOut] = []
    while sum(out.finish_reason is not None for out in outputs) < num_ends:
        outputs += (await next_report(channel)).outputs
    return outputs


async def test_the_engine_starts_answers_refuses_and_stops() -> None:
    async with started() as channel:
        ready, progress = await until_ready(channel)
        assert ready.limits.num_blocks == 4096
        assert [message.phase for message in progress] == ["first_token", "warming"]
        assert ready.start_s.keys() == {"load", "first_token", "warm"}
        assert sum(ready.start_s.values()) == pytest.approx(ready.load_s, abs=0.1)
        channel.send(request("a", n=2))
        channel.send(request("long", 100_000))
        channel.send(request("wide", n=9))
        channel.send(request("candidates", n=2, best_of=9))
        channel.send(request("endless", max_tokens=None))
        channel.send(Abort("endless"))
        outputs = await outputs_of(channel, 2 + 1 + 9 + 9 + 1)
        ends = {(out.request_id, out.choice): out for out in outputs if out.finish_reason is not None}
        assert ends["a", 0].finish_reason == ends["a", 1].finish_reason == "length"
        assert (ends["long", 0].error_status, ends["long", 0].error_param) == (400, "messages")
        assert ends["long", 0].error_code == "context_length_exceeded"
        assert (ends["wide", 8].error_status, ends["wide", 8].error_param) == (400, "n")
        assert (ends["candidates", 8].error_status, ends["candidates", 8].error_param) == (400, "best_of")
        assert ends["endless", 0].finish_reason == "abort"
        process = psutil.Process(channel.pid)
        channel.send(Shutdown())
        with pytest.raises(EngineDied, match="exit code 0"):
            await read_to_death(channel)
        assert not process.is_running()


@pytest.mark.slow
async def test_an_idle_engine_reports_every_second_and_uses_no_cpu() -> None:
    async with started() as channel:
        await until_ready(channel)
        process = psutil.Process(channel.pid)
        await next_report(channel)
        gaps_s: list[float] = []
        used_s: list[float] = []
        last_s = time.monotonic()
        while len(used_s) < 5 and min(used_s, default=1.0) > 0.03:  # other processes that use the same caches add to it
            before = process.cpu_times()
            for _ in range(3):
                report = await next_report(channel)
                gaps_s.append(time.monotonic() - last_s)
                last_s += gaps_s[-1]
                assert report.outputs == []
            after = process.cpu_times()
            used_s.append(after.user + after.system - before.user - before.system)
        assert min(gaps_s) < 5, "the limit must hold on a busy machine"
        assert min(used_s) <= 0.03


@pytest.mark.slow
async def test_heartbeats_continue_during_a_long_step_with_its_predicted_time() -> None:
    slow = StepTimeParams(knots_tokens=[1, 512], knot_ms=[1.0, 3000.0])
    async with started(msgspec.structs.replace(CONFIG, step_time=slow)) as channel:
        await until_ready(channel)
        channel.send(request("a", 512, max_tokens=1))
        expected_ms, began_s = [], time.monotonic()
        while not (isinstance(message := await channel.recv(), StepOutputs) and message.outputs):
            if isinstance(message, Heartbeat):
                expected_ms.append(message.expected_step_ms)
        assert time.monotonic() - began_s > 2.5, "the step must be long"
        assert max(expected_ms) > 1000
        while not isinstance(message := await channel.recv(), Heartbeat):
            pass
        assert message.expected_step_ms == 0.0


async def until_it_waits(process: psutil.Process) -> None:
    """Wait until the engine process uses no more CPU time for steps."""

    async def used_s() -> float:
        before = process.cpu_times()
        await asyncio.sleep(0.3)
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system

    limit_s = time.monotonic() + WAIT_LIMIT_S
    while await used_s() > 0.02:
        assert time.monotonic() < limit_s, "the engine must wait for its reader"


async def test_an_engine_waits_for_its_reader_and_loses_nothing() -> None:
    async with started() as channel:
        await until_ready(channel)
        channel.send(request("a", n=4, max_tokens=4000, logprobs=20))
        await eventually(lambda: channel._inbox.qsize() == channels.MAX_WAITING)
        await until_it_waits(psutil.Process(channel.pid))
        assert channel._inbox.qsize() == channels.MAX_WAITING
        channel.send(Abort("a"))
        outputs = await outputs_of(channel, 4)
        assert {out.finish_reason for out in outputs if out.finish_reason is not None} == {"abort"}
        positions = [sum(len(out.token_ids) for out in outputs if out.choice == choice) for choice in range(4)]
        assert 0 < max(positions) < 1000, "outputs must not be computed faster than they are read"


async def test_an_engine_that_waits_for_its_reader_stops_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "STOP_TIMEOUT_S", 3600)
    async with started() as channel:
        await until_ready(channel)
        channel.send(request("a", n=4, max_tokens=4000, logprobs=20))
        process = psutil.Process(channel.pid)
        await eventually(lambda: channel._inbox.qsize() == channels.MAX_WAITING)
        await until_it_waits(process)
        await asyncio.wait_for(channel.close(), WAIT_LIMIT_S)
        assert not process.is_running()


async def test_the_death_of_the_engine_is_noticed_at_once() -> None:
    async with started() as channel:
        await until_ready(channel)
        channel.send(request("a", max_tokens=None))
        await next_report(channel)
        assert channel.pid is not None
        os.kill(channel.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await read_to_death(channel)
        with pytest.raises(EngineDied):
            await channel.recv()
        channel.send(request("b"))


async def test_a_model_that_cannot_be_loaded_is_reported_with_its_reason() -> None:
    async with started(EngineConfig(model="/nowhere/model.gguf")) as channel:
        messages: list[Any] = []
        with pytest.raises(EngineDied, match="exit code 1"):
            await read_to_death(channel, messages)
        assert isinstance(messages[-1], Fatal)
        assert messages[-1].reason == "ModelNotFound"
        assert "/nowhere/model.gguf" in messages[-1].message


async def test_no_process_remains_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "link"))
    (tmp_path / "link").mkdir()
    async with started() as channel:
        await until_ready(channel)
        process = psutil.Process(channel.pid)
        assert sorted(os.listdir(tmp_path / "link")) == ["in", "out", "settings.json"]
    assert not process.is_running()
    assert os.listdir(tmp_path) == []


async def test_an_engine_that_has_just_started_can_be_ended_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "link"))
    (tmp_path / "link").mkdir()
    channel = EngineChannel(CONFIG, EngineProcess.launch(CONFIG))
    await channel.start()
    process = psutil.Process(channel.pid)
    monkeypatch.setattr(channels, "STOP_TIMEOUT_S", 3600)
    await asyncio.wait_for(channel.close(), WAIT_LIMIT_S)
    assert not process.is_running()
    assert os.listdir(tmp_path) == []


async def test_an_engine_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "STOP_TIMEOUT_S", 0.2)
    channel = EngineChannel(CONFIG, EngineProcess.launch(CONFIG))
    await channel.start()
    await until_ready(channel)
    process = psutil.Process(channel.pid)
    hang(process.pid)
    await channel.close()
    assert not process.is_running()


PARENT = """
import asyncio, sys
from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.channels import EngineChannel
from pagemill_engine.ipc.messages import Ready
from pagemill_engine.ipc.process import EngineProcess

async def main():
    config = EngineConfig(model="null", null_runner=True)
    channel = EngineChannel(config, EngineProcess.launch(config))
    await channel.start()
    while not isinstance(await channel.recv(), Ready):
        pass
    sys.stdout.write(f"{channel.pid}\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_the_engine_does_not_outlive_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    engine = psutil.Process(int(await parent.stdout.readline()))
    folder = Path(engine.cmdline()[-1])
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(psutil.wait_procs, [engine], timeout=WAIT_LIMIT_S)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    assert not await asyncio.to_thread(folder.exists)


class FakeLink:
    """A connection that gives messages from a list to the loop and records the answers."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None) -> Any:
        if self.messages:
            return self.messages.pop(0)
        return Shutdown() if timeout_s else None

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def start_heartbeat(self, expected_step_ms: Any) -> None:
        pass


def run_loop(core: EngineCore, messages: list[Any]) -> list[TokensOut]:
    link = FakeLink(messages)
    EngineLoop(core, link).run()  # type: ignore[arg-type]
    return [output for step in link.sent for output in step.outputs]


def test_a_broken_device_ends_the_process(checking_runner: Any) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4), checking_runner())
    core.runner.raise_on = lambda plan: True
    with pytest.raises(EngineFault, match="device") as caught:
        run_loop(core, [request(f"r{index}") for index in range(12)])
    assert fatal_of(caught.value).reason == "RunnerBroken"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_device_ends_the_process_with_its_first_step(checking_runner: Any, overlap: bool) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4, overlap=overlap), checking_runner())

    def lose(plan: Any) -> bool:
        raise DeviceLostError("The device failed: an illegal memory access was encountered")

    core.runner.raise_on = lose
    with pytest.raises(DeviceLostError) as caught:
        run_loop(core, [request("r")])
    fatal = fatal_of(caught.value)
    assert (fatal.reason, "illegal memory access" in fatal.message) == ("DeviceLost", True)


def test_a_device_that_is_lost_while_nothing_runs_ends_the_process(checking_runner: Any) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4), checking_runner())

    def lost() -> None:
        raise DeviceLostError("The ranks of this engine stopped")

    core.runner.info = core.runner.info._replace(check=lost)
    link = cast(Any, SimpleNamespace(receive=lambda timeout_s: None, send=lambda message: None))
    with pytest.raises(DeviceLostError):
        EngineLoop(core, link).run()


def test_a_device_lost_after_a_failed_step_ends_the_process_at_once(checking_runner: Any) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4, overlap=True), checking_runner())
    errors = [RuntimeError("out of memory"), DeviceLostError("The device failed: an illegal memory access")]

    def wait(handle: Any) -> Any:
        raise errors.pop(0)

    core.runner.wait = wait
    with pytest.raises(DeviceLostError):
        run_loop(core, [request("r")])
    assert errors == []


def test_several_bad_requests_do_not_end_the_process(checking_runner: Any) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4), checking_runner())
    core.runner.raise_on = lambda plan: "probe" not in plan.num_scheduled_tokens
    outputs = run_loop(core, [request(f"r{index}") for index in range(20)])
    assert [out.finish_reason for out in outputs] == ["error"] * 20


def test_a_fault_while_queueing_fails_only_that_request(checking_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4), checking_runner())
    add = core.add

    def broken(added: GenerateRequest) -> None:
        if added.request_id == "bad":
            raise ZeroDivisionError
        add(added)

    monkeypatch.setattr(core, "add", broken)
    outputs = run_loop(core, [request("bad"), request("good")])
    ends = {out.request_id: (out.finish_reason, out.error_status) for out in outputs if out.finish_reason is not None}
    assert ends == {"bad": ("error", 500), "good": ("length", 500)}


def test_garbage_collection_is_off_during_loading_and_ignores_loaded_objects(
    checking_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_loading: list[bool] = []

    def load(config: EngineConfig, progress: Any, early_digest: Any) -> Any:
        while_loading.append(gc.isenabled())
        return checking_runner()

    monkeypatch.setattr(factory, "create_runner", load)
    link = FakeLink([])
    try:
        serve(EngineConfig(model="m", block_size=4), link)  # type: ignore[arg-type]
        assert (while_loading, gc.isenabled()) == ([False], True)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_failed_load_leaves_garbage_collection_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: EngineConfig, progress: Any, early_digest: Any) -> Any:
        raise LoadError("ModelUnreadable", "broken")

    monkeypatch.setattr(factory, "create_runner", fail)
    with pytest.raises(LoadError):
        serve(EngineConfig(model="m"), FakeLink([]))  # type: ignore[arg-type]
    assert gc.isenabled()


def test_a_fault_while_aborting_is_survived_if_the_state_is_consistent(
    checking_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(EngineConfig(model="m", block_size=4), checking_runner())
    monkeypatch.setattr(core.scheduler, "abort", lambda *args: 1 // 0)
    outputs = run_loop(core, [request("a"), Abort("a"), request("b")])
    assert [out.finish_reason for out in outputs if out.finish_reason] == ["length", "length"]

    def torn(*args: Any) -> None:
        core.scheduler.kv.caches[0].pool.allocate(1)
        raise ZeroDivisionError

    monkeypatch.setattr(core.scheduler, "abort", torn)
    with pytest.raises(IntegrityError):
        run_loop(core, [request("c"), Abort("c")])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SelfTestError("nan"), "SelfTestFailed"),
        (SelfTestError("The engine failed on this request: OutOfMemoryError."), "StepTooLarge"),
        (MemoryError(), "OutOfMemory"),
        (LoadError("KVCacheTooSmall", "Lower maxModelLen."), "KVCacheTooSmall"),
        (UnreadableModelError("The file ends early."), "ModelUnreadable"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "EngineFailed"),
        (KeyError("x"), "EngineFailed"),
    ],
)
def test_every_end_has_a_reason(error: Exception, reason: str) -> None:
    assert fatal_of(error).reason == reason
    assert fatal_of(error).message


FIRST_TO_DECODE = """
import pathlib, sys, threading
import msgspec
from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.folder import SETTINGS_FILE
from pagemill_engine.ipc.link import ParentLink

folder = pathlib.Path(sys.argv[1])
(folder / SETTINGS_FILE).write_bytes(msgspec.json.encode(EngineConfig(model="x", num_threads=1, num_kv_blocks=4)))
link = ParentLink(folder)
link._configured.set()
sys.setswitchinterval(1e-6)
start, found = threading.Barrier(32), []

def read():
    start.wait()
    found.append(link.settings())

threads = [threading.Thread(target=read) for _ in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [EngineConfig(model="x", num_threads=1, num_kv_blocks=4)] * 32
"""


@pytest.mark.parametrize("attempt", range(6))
def test_several_threads_may_read_the_settings_first(tmp_path: Path, attempt: int) -> None:
    """The digest's thread and the main thread do; some such attempts ended with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", FIRST_TO_DECODE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, (attempt, done.returncode, done.stderr)

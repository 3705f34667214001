"""Poison requests and engine failures: no innocent request is blamed, and a poison request is found at a bounded cost.

The brain and the relay are real, on simulated time. Engines are scripts that fail in two ways: a poison request crashes
whatever computes it (with an error message, or with the whole pod and no message) or makes it silent, and a kill ends
one or several engines at once. Engines return after a restart. No gateway knows at once that an engine is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import virtual_loop
from frame_stream import FrameStream
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagemill_api.openai import render
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay.answer_stream import AskLiveness
from pagemill_gateway.relay.delivery import AnswerBroken
from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_gateway.relay.relay import Relay
from pagemill_gateway.relay.sinks import BodySink, StreamSink
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import ENGINE_CRASHED, ENGINE_FAILED, PagemillError, unavailable
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.attempts.attempt_failures import UpstreamFailure
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import Assignment, EngineFailureKind, RoutingRequest
from pagemill_routing.config import RoutingConfig

STEP_S = 0.05
SILENCE_S = 25.0
BLAMED = "request_crashed_engine"
WORDS: dict[EngineFailureKind, str] = {"crashed": ENGINE_CRASHED, "killed": ENGINE_FAILED}
CONFIG = RoutingConfig(outage_wait_s=300.0, queue=QueueLimits(max_requests=999, max_bytes=2**30, timeout_s=900.0))


class Poison:
    """A request that crashes the engine that computes its token at `position`."""

    def __init__(self, kind: EngineFailureKind, position: int) -> None:
        self.kind, self.position = kind, position
        self.num_victims = 0


class Engine:
    """One engine; `content` of an answer is the source of its bytes."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.up = False
        self.works = asyncio.Event()
        """Whether it computes and reports; otherwise it is silent, and its connections stay open."""
        self.works.set()
        self._cluster = cluster
        self._sequence = 0
        self._answers: dict[asyncio.Task[None], asyncio.Queue[bytes | Exception]] = {}

    def start(self) -> None:
        self.up = True
        self.report(snapshot=True)

    def report(self, *, snapshot: bool = False) -> None:
        self._sequence = 1 if snapshot else self._sequence + 1
        frame = StateFrame(
            sequence=self._sequence,
            snapshot=snapshot,
            max_model_len=1000,
            max_num_seqs=64,
            digests=Digests(tokenizer_bundle="t", weights="w"),
            load=EngineLoad(num_requests_running=len(self._answers)),
        )
        self._cluster.brain.observer.observe(self.name, frame)

    def take(self, request: GenerateRequest) -> Any:
        if not self.up:
            # A left-over connection shows no failure; a new one is refused.
            raise UpstreamFailure(random.choice(["lost", "unreachable"]), "gone")
        inbox: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        task = asyncio.create_task(self._compute(request, inbox))
        self._answers[task] = inbox
        task.add_done_callback(lambda done: self._answers.pop(done, None))
        return _Content(inbox)

    def die(self, kind: EngineFailureKind) -> None:
        if not self.up:
            return
        self.up = False
        answers, self._answers = self._answers, {}
        for task, inbox in answers.items():
            task.cancel()
            if kind in WORDS:
                error = unavailable("This server failed", code=WORDS[kind])
                meta = FrameMeta(
                    last=True,
                    error=error.message,
                    error_status=503,
                    error_type=error.type,
                    error_code=error.code,
                )
                inbox.put_nowait(encode_frame(meta, render.sse_error(error)))
            inbox.put_nowait(ConnectionResetError())
        self._cluster.spawn(self._come_back())

    async def _come_back(self) -> None:
        rng = self._cluster.rng
        await asyncio.sleep(rng.choice([0.0, 0.01, 0.2]))
        self._cluster.brain.observer.stream_lost(self.name)
        self._cluster.brain.observer.unreachable(self.name)
        await asyncio.sleep(rng.uniform(1.0, self._cluster.restart_s))
        self.start()

    async def _fall_silent(self) -> None:
        self.works.clear()
        await asyncio.sleep(SILENCE_S)
        self.works.set()

    async def _compute(self, request: GenerateRequest, inbox: asyncio.Queue[bytes | Exception]) -> None:
        poison = self._cluster.poisons.get(request.prompt_token_ids[0])
        done = len(request.resume[0].token_ids) if request.resume else 0
        total = request.sampling.max_tokens or 1
        await asyncio.sleep(STEP_S * self._cluster.rng.uniform(1, 8))
        for position in range(done, total):
            if poison is not None and position == poison.position:
                poison.num_victims += 1
                if poison.kind != "stalled":
                    return self.die(poison.kind)
                await self._fall_silent()
            await self.works.wait()
            reason = "length" if position == total - 1 else None
            meta = FrameMeta(token_ids=[7], num_text_chars=position + 1, position=position + 1, finish_reason=reason)
            inbox.put_nowait(encode_frame(meta, b"data: {}\n\n" if request.stream else b""))
            await asyncio.sleep(STEP_S)
        closing = render.SSE_DONE if request.stream else b"{}"
        inbox.put_nowait(encode_frame(FrameMeta(last=True, usage=Usage(1, total)), closing))


class _Content:
    def __init__(self, inbox: asyncio.Queue[bytes | Exception]) -> None:
        self._inbox = inbox

    async def receive(self) -> bytes:
        item = await self._inbox.get()
        if isinstance(item, Exception):
            raise item
        return item


class Cluster:
    """Engines, the brain and the relay of a gateway in front of them, and their network."""

    def __init__(self, seed: int, num_engines: int, restart_s: float) -> None:
        self.rng = random.Random(seed)
        self.restart_s = restart_s
        self.poisons: dict[int, Poison] = {}
        """Poison requests by the first token of their prompts."""
        self.outcomes: Counter[str] = Counter()
        self.poison_outcomes: list[str] = []
        self.brain = LocalBrain(CONFIG, clock=asyncio.get_running_loop().time, rng=random.Random(seed))
        self.engines = {f"e{number}": Engine(self, f"e{number}") for number in range(num_engines)}
        endpoints = [Endpoint(id=each, data_url=f"http://{each}", control_url="http://c") for each in self.engines]
        self.brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="m", name="m", endpoints=endpoints)]))
        for engine in self.engines.values():
            engine.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep_alive = KeepAlive(1.0)
        upstream: Any = self
        self._relay = Relay(
            self.brain, upstream, WorkerMetrics(), self._keep_alive, max_attempts=3, journal_tokens=10**6
        )

    def spawn(self, work: Any) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for engine in self.engines.values():
                if engine.up and engine.works.is_set() and self.brain.registry.endpoints[engine.name].reports.connected:
                    engine.report()

    async def kill(self, at_s: float, num_at_once: int, spread_s: float) -> None:
        await asyncio.sleep(at_s)
        for engine in self.rng.sample(list(self.engines.values()), min(num_at_once, len(self.engines))):
            engine.die(self.rng.choice(["lost", "killed"]))
            await asyncio.sleep(self.rng.uniform(0, spread_s))

    async def ask(self, number: int, at_s: float) -> None:
        """Send one client's request, whose first token is `number`."""
        await asyncio.sleep(at_s)
        stream = self.rng.random() < 0.5
        request = GenerateRequest(
            request_id=f"r{number}",
            model="m",
            prompt_token_ids=[number, 2, 3],
            sampling=SamplingParams(max_tokens=self.rng.choice([2, 10, 60])),
            stream=stream,
        )
        poison = self.poisons.get(number)
        if poison is not None:
            request = msgspec.structs.replace(request, sampling=SamplingParams(max_tokens=poison.position + 20))
        sink = StreamSink(_nowhere) if stream else BodySink()
        try:
            record = RequestRecord(route="/v1/completions", stream=stream)
            await self._relay.run(await self.brain.find("m"), request, RoutingRequest(3), sink, record)
            outcome = "served"
        except AnswerBroken as broken:
            outcome = str(broken.error.code)
        except PagemillError as error:
            outcome = str(error.code)
        if poison is not None:
            self.poison_outcomes.append(outcome)
        else:
            self.outcomes[outcome] += 1

    async def open(
        self,
        choice: Assignment,
        body: bytes,
        request_id: str,
        liveness: AskLiveness,
        on_accepted: Callable[[], None],
        on_freed: Callable[[], None],
    ) -> FrameStream:
        """Open a stream: this is the relay's `Upstream`."""
        await asyncio.sleep(0.001)
        content = self.engines[choice.endpoint_id].take(msgspec.msgpack.decode(body, type=GenerateRequest))
        if self.engines[choice.endpoint_id].works.is_set():
            on_accepted()
        return FrameStream(content, "w", 10.0, liveness)

    async def play(self, asked: list[Any], *others: Any) -> None:
        """Run until all requests have their answers."""
        self.spawn(self.heartbeat())
        for each in others:
            self.spawn(each)
        await asyncio.gather(*asked)
        self._keep_alive.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def _nowhere(_: bytes) -> None: ...


SEEDS = st.integers(0, 2**32)
ENGINES = st.integers(1, 5)
RESTARTS_S = st.sampled_from([2.0, 10.0, 60.0])
KILLS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 5), st.sampled_from([0.0, 0.002, 0.3])), min_size=1, max_size=8
)
"""The time of each kill, the number of engines, and the time span."""


@settings(deadline=None, max_examples=25)
@given(SEEDS, ENGINES, RESTARTS_S, KILLS, st.integers(1, 40))
def test_kills_fail_no_innocent_request(
    seed: int, num_engines: int, restart_s: float, kills: list[tuple[float, int, float]], num_requests: int
) -> None:
    async def main() -> Cluster:
        cluster = Cluster(seed, num_engines, restart_s)
        asked = [cluster.ask(10 + number, cluster.rng.uniform(0, 30)) for number in range(num_requests)]
        await cluster.play(asked, *(cluster.kill(*each) for each in kills))
        return cluster

    assert virtual_loop.run(main()).outcomes == {"served": num_requests}


@settings(deadline=None, max_examples=25)
@given(SEEDS, ENGINES, RESTARTS_S, st.sampled_from([0, 0, 1, 30]), st.integers(0, 40))
@example(1, 1, 2.0, 30, 9)
@pytest.mark.parametrize(("kind", "most"), [("crashed", 3), ("lost", 4)])
def test_a_poison_request_is_found_and_fails_no_other_request(
    kind: EngineFailureKind, most: int, seed: int, num_engines: int, restart_s: float, position: int, num_requests: int
) -> None:
    async def main() -> Cluster:
        cluster = Cluster(seed, num_engines, restart_s)
        cluster.poisons[1] = Poison(kind, position)
        asked = [cluster.ask(10 + number, cluster.rng.uniform(0, 20)) for number in range(num_requests)]
        await cluster.play([*asked, cluster.ask(1, cluster.rng.uniform(0, 10))])
        return cluster

    cluster = virtual_loop.run(main())
    assert cluster.poison_outcomes == [BLAMED]
    assert cluster.poisons[1].num_victims <= most + (position > 0)
    assert cluster.outcomes == ({"served": num_requests} if num_requests else {})


@settings(deadline=None, max_examples=8)
@given(SEEDS, st.integers(4, 6), st.sampled_from([0, 0, 1, 30]), st.integers(0, 20))
def test_a_request_that_makes_engines_silent_is_sent_to_at_most_three(
    seed: int, num_engines: int, position: int, num_requests: int
) -> None:
    async def main() -> Cluster:
        cluster = Cluster(seed, num_engines, 2.0)
        cluster.poisons[1] = Poison("stalled", position)
        asked = [cluster.ask(10 + number, cluster.rng.uniform(0, 20)) for number in range(num_requests)]
        await cluster.play([*asked, cluster.ask(1, cluster.rng.uniform(0, 10))])
        return cluster

    cluster = virtual_loop.run(main())
    assert cluster.poison_outcomes[0] in (BLAMED, "bad_upstream")
    assert cluster.poisons[1].num_victims <= 3
    assert cluster.outcomes == ({"served": num_requests} if num_requests else {})


@settings(deadline=None, max_examples=25)
@given(SEEDS, ENGINES, RESTARTS_S, KILLS, st.integers(0, 40), st.sampled_from(["crashed", "lost"]))
def test_a_poison_request_is_stopped_also_during_kills(
    seed: int,
    num_engines: int,
    restart_s: float,
    kills: list[tuple[float, int, float]],
    num_requests: int,
    kind: EngineFailureKind,
) -> None:
    async def main() -> Cluster:
        cluster = Cluster(seed, num_engines, restart_s)
        cluster.poisons[1] = Poison(kind, 0)
        asked = [cluster.ask(10 + number, cluster.rng.uniform(0, 20)) for number in range(num_requests)]
        await cluster.play(
            [*asked, cluster.ask(1, cluster.rng.uniform(0, 10))], *(cluster.kill(*each) for each in kills)
        )
        return cluster

    cluster = virtual_loop.run(main())
    assert cluster.poison_outcomes[0] in (BLAMED, "bad_upstream")
    assert cluster.poisons[1].num_victims <= 8
    assert BLAMED not in cluster.outcomes

"""Tenants that try to exceed their limits: whatever they send and however it ends, engines never generate more.

Limiter, allowances, growth, stores and Redis are real; the engines are small simulations.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import virtual_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer, redis_server
from waiting import eventually

from examples import num_examples
from pagemill_gateway.config import RedisConfig
from pagemill_gateway.limits.limiter import Limiter, Reservation
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.redis.link import RedisLink
from pagemill_gateway.limits.redis.store import RedisStore
from pagemill_gateway.limits.refusals import Limited
from pagemill_gateway.limits.store import ReservationRequest, Store, token_limits
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay.answer_stream import AnswerStream
from pagemill_gateway.relay.growth import Growth
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.request.continuing import PROGRESS_TOKENS, can_be_continued
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_routing.brain.interface import Assignment, HashScheme, Target
from pagemill_servers.keys.caller import Caller, Limits

CONTEXT, PROMPT = 2000, 7
NOON_S = 1_795_348_800.0
SCHEME = HashScheme("w", "auto", 16, 4)
TARGET = Target("ns/d", "tiny", "digest", CONTEXT, None, "deployment", SCHEME)
prefixes = (f"adversary-{number}" for number in itertools.count())
ASSIGNMENT = Assignment(1, "engine", "http://engine", "")


@dataclass
class Engine:
    """One engine request: a step gives each running sequence a token."""

    request: GenerateRequest
    allowance: int
    length: int
    """The length at which the first sequence stops; each further sequence is as much longer."""
    counts: dict[int, int] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for choice in range(self.request.sampling.num_sequences):
            self.counts.setdefault(choice, 0)
            self.reported.setdefault(choice, 0)

    @property
    def num_generated(self) -> int:
        return sum(self.counts.values())

    def step(self) -> list[FrameMeta]:
        metas: list[FrameMeta] = []
        for choice in sorted(self.counts.keys() - self.finished):
            metas += self._advance(choice)
        if len(self.finished) == len(self.counts):
            metas.append(FrameMeta(last=True, usage=self.usage))
        return metas

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), self.num_generated)

    def _advance(self, choice: int) -> list[FrameMeta]:
        most = min(self.request.sampling.max_tokens or CONTEXT, CONTEXT - len(self.request.prompt_token_ids))
        if self.counts[choice] < self.allowance:
            self.counts[choice] += 1
        reason: Any = None
        if self.counts[choice] >= min(most, self.allowance):
            reason = "length"
        elif self.counts[choice] >= self.length * (1 + choice):
            reason = "stop"
        if reason is not None:
            self.finished.add(choice)
        unreported = self.counts[choice] - self.reported[choice]
        if not can_be_continued(self.request) or not (self.request.stream or reason or unreported >= PROGRESS_TOKENS):
            return []
        self.reported[choice] = self.counts[choice]
        return [FrameMeta(choice=choice, token_ids=[1] * unreported, finish_reason=reason)]


class Engines:
    """The engines of all requests; messages may be lost."""

    def __init__(self) -> None:
        self.by_id: dict[str, Engine] = {}
        self.lossy = False

    def raise_allowance(self, request_id: str, tokens: int) -> bool:
        if self.lossy or request_id not in self.by_id:
            return False
        engine = self.by_id[request_id]
        engine.allowance = max(engine.allowance, tokens)
        return True


class Sent:
    """The part of an `AnswerStream` that `Growth` uses."""

    def __init__(self, engines: Engines, request_id: str) -> None:
        self._engines, self._request_id = engines, request_id

    def raise_allowance(self, tokens: int) -> bool:
        return self._engines.raise_allowance(self._request_id, tokens)


class Part:
    """One engine request, with the state that `Relay` has for it."""

    def __init__(self, engines: Engines, request: GenerateRequest, growth: Growth, length: int) -> None:
        self.request, self.growth = request, growth
        self._engines, self._length = engines, length
        self.usage: Usage | None = None
        self.num_reported = 0
        self._ids = (f"{request.request_id}-{number}" for number in itertools.count())
        self._ask({}, set())

    def _ask(self, counts: dict[int, int], finished: set[int]) -> None:
        name = next(self._ids)
        allowance = self.growth.begin()
        self.growth.opened(cast(AnswerStream, Sent(self._engines, name)))
        self.engine = Engine(self.request, allowance, self._length, dict(counts), dict(counts), set(finished))
        self._engines.by_id = {key: each for key, each in self._engines.by_id.items() if each is not self.engine}
        self._engines.by_id[name] = self.engine

    def step(self) -> None:
        if self.usage is not None:
            return
        metas = self.engine.step()
        if not metas:
            return
        for meta in metas:
            self.growth.count(meta)
        self.num_reported += sum(len(meta.token_ids) for meta in metas)
        if metas[-1].last:
            self.usage = metas[-1].usage

    def migrate(self, *, kept: bool) -> None:
        """Continue on another engine, or restart if not `kept`, as when the journal has no capacity."""
        if self.usage is not None:
            return
        lost = self.engine
        if can_be_continued(self.request) and (kept or self.request.stream):
            self._ask(lost.reported, {each for each in lost.finished if lost.reported[each] == lost.counts[each]})
            return
        self.num_reported = 0
        self.growth.begin_anew()
        self._ask({}, set())


@dataclass
class Request:
    """One client request, with the state that `GenerateRoute` has for it."""

    record: RequestRecord
    reservation: Reservation
    parts: list[Part]
    num_sequences: int

    @property
    def num_used(self) -> int:
        return self.record.prompt_tokens + sum(part.engine.num_generated for part in self.parts)

    @property
    def over(self) -> bool:
        return all(part.usage is not None for part in self.parts)


class World:
    def __init__(self, limits: Limits, stores: Sequence[Store]) -> None:
        """Create the gateways with these stores, one for each."""
        self.limits = limits
        self.caller = Caller(key_hash="ab" * 32, tenant="adversary", limits=limits)
        self.limiters = itertools.cycle([Limiter(store, WorkerMetrics()) for store in stores])
        self.engines = Engines()
        self.running: list[Request] = []
        self.num_used = 0
        """Prompt and generated tokens of ended requests, except those that the platform has voided."""
        self.num_left = 0
        """Number of requests whose client left, which may be charged for more tokens than were generated."""
        self._names = (f"request-{number}" for number in itertools.count())

    async def ask(self, prompts: int, length: int, stream: bool, sampling: SamplingParams) -> bool:
        requests = [
            GenerateRequest(
                request_id=next(self._names),
                model="tiny",
                prompt_token_ids=[1] * PROMPT,
                sampling=sampling,
                stream=stream,
            )
            for _ in range(prompts)
        ]
        try:
            reservation = await next(self.limiters).reserve(self.caller, TARGET, requests)
        except Limited:
            return False
        record = RequestRecord(route="r", model="tiny")
        record.served_by(TARGET, requests)
        record.chosen(ASSIGNMENT)
        parts = []
        for request, allowance in zip(requests, reservation.allowances, strict=True):
            assert allowance is not None
            growth = Growth(allowance)
            parts.append(Part(self.engines, request, growth, length))
        num_sequences = sum(each.sampling.num_sequences for each in requests)
        self.running.append(Request(record, reservation, parts, num_sequences))
        return True

    async def step(self) -> None:
        for request in self.running:
            for part in request.parts:
                part.step()
        for request in [each for each in self.running if each.over]:
            request.record.finished = True
            for part in request.parts:
                assert part.usage is not None
                request.record.add_usage(part.usage)
            await self._end(request, request.num_used)
        for _ in range(5):
            await asyncio.sleep(0)
        self.check()

    async def leave(self, request: Request) -> None:
        self.num_left += 1
        await self._end(request, request.num_used, was_cut_short=True)

    async def fail(self, request: Request) -> None:
        """Fail the request on the platform's side: only delivered tokens are charged, and nothing if there are none."""
        delivered = sum(part.num_reported for part in request.parts)
        await self._end(request, request.record.prompt_tokens + delivered if delivered else 0)

    async def _end(self, request: Request, num_used: int, *, was_cut_short: bool = False) -> None:
        self.running.remove(request)
        self.num_used += num_used
        for part in request.parts:
            await part.growth.close()
        request.record.num_delivered = sum(part.num_reported for part in request.parts)
        request.reservation.settle(request.record, was_cut_short=was_cut_short)

    def check(self) -> None:
        used = self.num_used + sum(request.num_used for request in self.running)
        for limit in (self.limits.tokens_per_minute, self.limits.tokens_per_day, self.limits.tokens_per_month):
            assert limit is None or used <= limit
        if self.limits.concurrency is not None:
            assert sum(request.num_sequences for request in self.running) <= self.limits.concurrency


samplings = st.one_of(
    st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        max_tokens=st.none() | st.sampled_from([1, 20, 300, 900]),
        min_tokens=st.just(0),
    ),
    st.builds(lambda width, most: SamplingParams(best_of=width, n=1, max_tokens=most), st.integers(2, 4), st.just(40)),
    st.just(SamplingParams(use_beam_search=True, n=2, max_tokens=30)),
)
asks = st.tuples(st.integers(1, 3), st.sampled_from([1, 10, 200, 400, 1500]), st.booleans(), samplings)
rounds = st.tuples(
    st.integers(1, 4),
    asks,
    st.sampled_from([0, 1, 15, 130, 400]),
    st.sampled_from(["nothing", "leave", "fail", "migrate", "lossy"]),
    st.integers(0, 5),
)
"""Requests of a kind, steps of the engines, what happens next, and to which request."""
amounts = st.sampled_from([8, 20, 300, 600, 2500])
limits = st.builds(
    Limits,
    requests_per_minute=st.none(),
    tokens_per_minute=amounts,
    concurrency=st.none() | st.integers(1, 12),
    tokens_per_day=st.none() | amounts,
    tokens_per_month=st.none() | amounts,
)


async def ask(world: World, prompts: int, length: int, stream: bool, sampling: SamplingParams) -> bool:
    """Send a request; return whether it was admitted."""
    chosen = sampling.num_sequences > sampling.n or sampling.use_beam_search
    return await world.ask(prompts, length, stream and not chosen, sampling)


async def play(world: World, steps: list[Any]) -> None:
    for count, wanted, num_steps, event, index in steps:
        for _ in range(count):
            await ask(world, *wanted)
        for _ in range(num_steps):
            await world.step()
        world.engines.lossy = event == "lossy"
        await disturb(world, event, index)
        world.check()


async def disturb(world: World, kind: str, index: int) -> None:
    if not world.running:
        return
    request = world.running[index % len(world.running)]
    if kind == "leave":
        await world.leave(request)
    elif kind == "fail":
        await world.fail(request)
    elif kind == "migrate":
        for part in request.parts:
            part.migrate(kept=index % 2 == 0)


async def use_up(world: World) -> None:
    """Request as many tokens as are left, so that tokens that were not charged become visible."""
    world.engines.lossy = False
    while True:
        admitted = False
        for max_tokens in (None, 100, 1):
            while await ask(world, 1, CONTEXT, True, SamplingParams(max_tokens=max_tokens)):
                admitted = True
        if not admitted and not world.running:
            return
        await world.step()


@settings(max_examples=num_examples(80), deadline=None)
@given(limits=limits, steps=st.lists(rounds, max_size=8))
def test_engines_never_generate_more_than_the_limits_of_a_key(limits: Limits, steps: list[Any]) -> None:
    async def main() -> None:
        store = MemoryStore(lambda: 5_000_000, lambda: NOON_S)
        world = World(limits, [store])
        await play(world, steps)
        await use_up(world)
        assert store.num_held == 0
        whole = Limits(concurrency=1)
        assert store.decide(ReservationRequest(world.caller.account, "last", 0, whole)).refused is None, (
            "a sequence must not stay reserved"
        )
        if world.num_left == 0:
            (least, *_) = sorted(token_limits(limits))
            assert world.num_used > least - PROMPT - 1, "unused tokens must be returned"

    virtual_loop.run(main())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(limits=limits, steps=st.lists(rounds, min_size=2, max_size=6))
def test_three_gateways_with_one_redis_let_engines_generate_no_more_than_one(
    server: RedisServer, limits: Limits, steps: list[Any]
) -> None:
    """Clients leave early, requests fail, and answers migrate."""

    async def main() -> None:
        config = RedisConfig(url=server.url, prefix=next(prefixes), timeout_ms=10_000.0)
        clock = {"now_ms": lambda: 1_795_391_000_000, "now_unix_s": lambda: NOON_S}
        gateways = [RedisStore(RedisLink(config), **clock) for _ in range(3)]
        for each in gateways:
            each.start()
        try:
            await eventually(lambda: all(each.up for each in gateways))
            world = World(limits, gateways)
            await play(world, steps)
            await use_up(world)
            assert all(each.up for each in gateways), "no gateway may have decided alone"
        finally:
            for each in gateways:
                await each.close()

    asyncio.run(main())

"""Several gateways share limits through a real Redis and continue with their shares while it is unavailable."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from limit_histories import limits, sequences_of, step
from redis_server import RedisServer, redis_server
from waiting import SOON_S, eventually

from examples import num_examples
from pagemill_gateway.config import RedisConfig
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.redis import link as redis_link
from pagemill_gateway.limits.redis import shared_keys
from pagemill_gateway.limits.redis import store as redis_store
from pagemill_gateway.limits.redis.link import RedisLink
from pagemill_gateway.limits.redis.shared_keys import SharedKeys
from pagemill_gateway.limits.redis.store import RedisStore, share_of
from pagemill_gateway.limits.store import ExtensionRequest, ReservationRequest, Use
from pagemill_protocol.errors import PagemillError
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.caller import Limits
from pagemill_servers.keys.ring import KeyRing

PATIENT_MS = 10_000.0
"""A timeout that is long enough for a loaded machine, so that Redis does not look unavailable."""
leases = (f"lease-{number}" for number in itertools.count())
prefixes = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Start a Redis server for a test that kills it."""
    with redis_server(tmp_path) as running:
        yield running


@asynccontextmanager
async def stores(
    server: RedisServer, count: int = 2, *, prefix: str = "", timeout_ms: float = PATIENT_MS, wait: bool = True
) -> AsyncIterator[list[RedisStore]]:
    """Yield the stores of several gateways, which know each other from the start."""
    prefix = prefix or next(prefixes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_link, "CONNECT_TIMEOUT_S", max(redis_link.CONNECT_TIMEOUT_S, timeout_ms / 1000))
        running = [
            RedisStore(RedisLink(RedisConfig(url=server.url, prefix=prefix, timeout_ms=timeout_ms)))
            for _ in range(count)
        ]
    for each in running:
        each.start()
    try:
        if wait:
            await eventually(lambda: all(each.up for each in running))
        yield running
    finally:
        for each in running:
            await each.close()


def ask(limits: Limits, tokens: int = 1, account: str = "a") -> ReservationRequest:
    return ReservationRequest(account, next(leases), tokens, limits)


# -- equal rules ------------------------------------------------------------------------------------------------------

histories = st.lists(step | st.just(("undo", 0)), max_size=40)


@settings(max_examples=num_examples(60), deadline=None)
@given(limits=limits, history=histories)
@example(limits=Limits(tokens_per_month=1), history=[("reserve", 0), ("extend", 1), ("reserve", 1)])
def test_redis_decides_like_the_memory_of_one_gateway(
    server: RedisServer, limits: Limits, history: list[tuple[str, int]]
) -> None:
    asyncio.run(_same_answers(server, limits, history, num_gateways=1))


@settings(max_examples=30, deadline=None)
@given(limits=limits, history=histories)
def test_a_tenant_gets_no_more_from_three_gateways_than_from_one(
    server: RedisServer, limits: Limits, history: list[tuple[str, int]]
) -> None:
    """Requests go to random gateways, and the limits hold to the token."""
    asyncio.run(_same_answers(server, limits, history, num_gateways=3))


async def _same_answers(
    server: RedisServer, limits: Limits, history: list[tuple[str, int]], *, num_gateways: int
) -> None:
    now_ms = 1_795_391_000_000

    def clock() -> int:
        return now_ms

    config = RedisConfig(url=server.url, prefix=next(prefixes), timeout_ms=PATIENT_MS)
    gateways = [
        RedisStore(RedisLink(config), now_ms=clock, now_unix_s=lambda: now_ms / 1000) for _ in range(num_gateways)
    ]
    alone = MemoryStore(clock, lambda: now_ms / 1000)
    for each in gateways:
        each.start()
    try:
        await eventually(lambda: all(each.up for each in gateways))
        held: dict[str, tuple[RedisStore, int]] = {}
        grown: set[str] = set()
        for number, (kind, amount) in enumerate(history):
            if kind == "wait":
                # Leases would expire without their renewal, which depends on the server's own clock.
                now_ms += min(amount, redis_store.LEASE_S * 1000 // 41)
            elif kind == "reserve":
                shared = gateways[(number + amount) % num_gateways]
                asked = ask(limits, amount)._replace(sequences=sequences_of(amount))
                answer = await shared.reserve(asked)
                assert answer == alone.decide(asked)
                held |= {asked.lease: (shared, answer.granted)} if answer.refused is None else {}
            elif held and kind == "extend":
                lease = next(reversed(held))
                shared, num_held = held[lease]
                more = ExtensionRequest("a", lease, num_held // 2, amount, limits)
                granted = await shared.extend(more)
                assert granted == alone.decide_more(more)
                held[lease] = shared, num_held + granted
                grown.add(lease)
            elif held:
                lease = next(iter(held))
                shared, _ = held.pop(lease)
                for store in (shared, alone):
                    if kind == "undo" and lease not in grown:
                        store.undo(lease)
                    else:
                        store.settle(lease, amount)
                await shared.flush()
                await eventually(lambda: shared.num_unpublished == 0)  # noqa: B023
            used = await gateways[number % num_gateways].use(["a", "stranger"])
            assert used.is_shared
            assert used.accounts == [alone.use_of("a"), Use()]
    finally:
        for each in gateways:
            await each.close()


# -- several gateways -------------------------------------------------------------------------------------------------


async def test_two_gateways_share_one_limit_to_the_last_request(server: RedisServer) -> None:
    limits = Limits(requests_per_minute=50)
    async with stores(server) as (one, two):
        answers = await asyncio.gather(*(store.reserve(ask(limits)) for _ in range(40) for store in (one, two)))
    assert sum(answer.refused is None for answer in answers) == 50
    assert {answer.refused for answer in answers} == {None, "requests"}


async def test_concurrency_reserved_at_one_gateway_is_free_for_the_other_when_settled(server: RedisServer) -> None:
    limits = Limits(concurrency=3)
    async with stores(server) as (one, two):
        taken = [ask(limits) for _ in range(3)]
        for each in taken:
            assert (await one.reserve(each)).refused is None
        assert (await two.reserve(ask(limits))).refused == "concurrency"
        one.settle(taken[0].lease, 5)
        await eventually(lambda: one.num_unpublished == 0)
        assert (await two.reserve(ask(limits))).refused is None
        assert (await one.reserve(ask(limits))).refused == "concurrency"


@pytest.mark.slow
async def test_the_reservations_of_a_gateway_that_dies_expire(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "LEASE_S", 4)
    monkeypatch.setattr(redis_store, "RENEW_S", 0.1)
    limits = Limits(concurrency=2)
    prefix = next(prefixes)
    async with stores(server, 1, prefix=prefix) as (alive,):
        dead = RedisStore(RedisLink(RedisConfig(url=server.url, prefix=prefix, timeout_ms=PATIENT_MS)))
        dead.start()
        await eventually(lambda: dead.up)
        assert (await dead.reserve(ask(limits))).refused is None
        assert (await alive.reserve(ask(limits))).refused is None
        assert (await alive.reserve(ask(limits))).refused == "concurrency"
        await _die(dead)

        async def got_in() -> bool:
            return (await alive.reserve(ask(limits))).refused is None

        await eventually(got_in, every_s=0.05)
        assert (await alive.reserve(ask(limits))).refused == "concurrency", "renewed reservations must remain"


async def _die(store: RedisStore) -> None:
    """Stop all reports of the store, as SIGKILL would."""
    for task in store._tasks:
        task.cancel()
    await asyncio.gather(*store._tasks, return_exceptions=True)
    await store._link.close()


async def test_a_request_cancelled_during_its_reservation_leaves_nothing_reserved(server: RedisServer) -> None:
    limits = Limits(concurrency=1, tokens_per_day=100)
    async with stores(server, 1) as (store,):
        for _ in range(20):
            task = asyncio.create_task(store.reserve(ask(limits, 100)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: store.num_unpublished == 0)
        assert (await store.reserve(ask(limits, 100))).refused is None


async def test_sequences_are_counted_across_gateways_and_renewed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "RENEW_S", 0.05)
    limits = Limits(concurrency=10)
    async with stores(server) as (one, two):
        first = ask(limits)._replace(sequences=8)
        assert (await one.reserve(first)).refused is None
        await asyncio.sleep(0.2)  # time for some renewals
        assert (await two.reserve(ask(limits)._replace(sequences=3))).refused == "concurrency"
        assert (await two.reserve(ask(limits)._replace(sequences=2))).refused is None
        one.settle(first.lease, 1)
        await eventually(lambda: one.num_unpublished == 0)
        assert (await two.reserve(ask(limits)._replace(sequences=9))).refused == "concurrency"
        assert (await two.reserve(ask(limits)._replace(sequences=8))).refused is None


async def test_reservations_of_two_gateways_grow_within_one_limit(server: RedisServer) -> None:
    limits = Limits(tokens_per_minute=1000, tokens_per_day=900)
    async with stores(server) as (one, two):
        asked = [(one, ask(limits, 100)), (two, ask(limits, 100))]
        for store, each in asked:
            assert (await store.reserve(each)).granted == 100
        more = [
            store.extend(ExtensionRequest("a", each.lease, 50, 300, limits)) for _ in range(3) for store, each in asked
        ]
        assert sum(await asyncio.gather(*more)) == 700
        assert (await two.reserve(ask(limits, 1))).refused == "budget_day"
        for store, each in asked:
            store.settle(each.lease, 120)
        await eventually(lambda: one.num_unpublished == two.num_unpublished == 0)
        assert (await one.reserve(ask(limits, 661))).refused == "budget_day"
        assert (await one.reserve(ask(limits, 660))).refused is None


async def test_an_abandoned_growth_leaves_nothing_reserved(server: RedisServer) -> None:
    limits = Limits(tokens_per_minute=1000)
    async with stores(server, 1) as (store,):
        for _ in range(20):
            asked = ask(limits, 10)
            await store.reserve(asked)
            growing = asyncio.create_task(store.extend(ExtensionRequest("a", asked.lease, 5, 500, limits)))
            await asyncio.sleep(0)
            growing.cancel()
            store.settle(asked.lease, 5)
            await asyncio.gather(growing, return_exceptions=True)
        await eventually(lambda: store.num_unpublished == 0)
        assert store.local.num_held == 0
        assert (await store.reserve(ask(limits, 900))).refused is None


# -- without Redis ----------------------------------------------------------------------------------------------------


def test_shares_add_up_to_the_limit_and_are_never_zero() -> None:
    whole = Limits(requests_per_minute=10, tokens_per_minute=100, concurrency=1)
    share = share_of(whole, 3)
    assert share == Limits(4, 34, 1, None, None)
    assert share_of(whole, 1) == whole


@pytest.mark.slow
async def test_without_redis_each_gateway_continues_with_its_share_and_reconnects(own_server: RedisServer) -> None:
    limits = Limits(requests_per_minute=40)
    async with stores(own_server) as (one, two):
        await eventually(lambda: one.num_gateways == two.num_gateways == 2)
        assert (await one.reserve(ask(limits))).refused is None
        own_server.kill()
        granted = 0
        for store in (one, two):
            answers = [await store.reserve(ask(limits)) for _ in range(40)]
            granted += sum(answer.refused is None for answer in answers)
            assert answers[0].requests is not None
            assert answers[0].requests.limit == 40, "clients must see the whole limit"
        assert granted == 39, "20 for each gateway, and the earlier request counts"
        await eventually(lambda: not one.up and not two.up)
        own_server.start()
        await eventually(lambda: one.up and two.up)
        assert (await one.reserve(ask(limits, account="b"))).requests is not None


async def test_a_frozen_redis_delays_one_request_and_then_none(own_server: RedisServer) -> None:
    limits = Limits(requests_per_minute=10_000)
    async with stores(own_server, 1, timeout_ms=200.0) as (store,):
        assert (await store.reserve(ask(limits))).refused is None
        own_server.freeze()
        answers = await asyncio.gather(*(store.reserve(ask(limits)) for _ in range(50)))
        assert all(answer.refused is None for answer in answers)
        await eventually(lambda: not store.up)
        openings = store.num_openings
        # While the circuit breaker is open, a reservation does not even yield to the event loop.
        waiting = store.reserve(ask(limits))
        with pytest.raises(StopIteration) as done:
            waiting.send(None)
        assert done.value.value.refused is None
        assert store.num_openings == openings
        own_server.thaw()
        await eventually(lambda: store.up)


async def test_tokens_used_without_redis_are_charged_when_it_returns(own_server: RedisServer) -> None:
    limits = Limits(tokens_per_day=1000)
    async with stores(own_server, 1) as (store,):
        before, during = ask(limits, 100), ask(limits, 100)
        await store.reserve(before)
        own_server.kill()
        await store.reserve(during)
        store.settle(before.lease, 10)
        store.settle(during.lease, 700)
        own_server.start()  # Redis has lost all counters
        await eventually(lambda: store.up and store.num_unpublished == 0)
        assert (await store.reserve(ask(limits, 301))).refused == "budget_day"
        assert (await store.reserve(ask(limits, 300))).refused is None


@pytest.mark.slow
async def test_without_redis_reservations_grow_within_the_share(own_server: RedisServer) -> None:
    limits = Limits(tokens_per_minute=1000)
    async with stores(own_server) as (one, two):
        await eventually(lambda: one.num_gateways == two.num_gateways == 2)
        asked = ask(limits, 100)
        await one.reserve(asked)
        own_server.kill()
        assert await one.extend(ExtensionRequest("a", asked.lease, 50, 900, limits)) == 400
        assert await one.extend(ExtensionRequest("a", asked.lease, 200, 900, limits)) == 0
        refused = await one.reserve(ask(limits, 900)._replace(least=600))
        assert (refused.refused, refused.retry_after_s) == ("tokens", 5.0), "the prompt alone exceeds the share"
        own_server.start()  # Redis has lost the reservation
        await eventually(lambda: one.up and two.up and one.num_gateways == 2)
        assert await one.extend(ExtensionRequest("a", asked.lease, 300, 900, limits)) == 0, "the share still applies"
        one.settle(asked.lease, 450)
        await eventually(lambda: one.num_unpublished == 0)


async def test_growth_without_redis_is_charged_when_it_returns(own_server: RedisServer) -> None:
    limits = Limits(tokens_per_day=1000)
    async with stores(own_server, 1, timeout_ms=1000.0) as (store,):
        asked = ask(limits, 100)
        await store.reserve(asked)
        own_server.freeze()
        assert await store.extend(ExtensionRequest("a", asked.lease, 50, 500, limits)) == 500
        own_server.thaw()
        await eventually(lambda: store.up)
        store.settle(asked.lease, 600)
        await eventually(lambda: store.num_unpublished == 0)
        assert (await store.reserve(ask(limits, 401))).refused == "budget_day"
        assert (await store.reserve(ask(limits, 400))).refused is None


async def test_a_gateway_may_start_before_redis(own_server: RedisServer) -> None:
    own_server.kill()
    async with stores(own_server, 1, wait=False) as (store,):
        assert (await store.reserve(ask(Limits(requests_per_minute=1)))).refused is None
        own_server.start()
        await eventually(lambda: store.up)


async def test_counters_damaged_by_another_client_affect_one_account_only(server: RedisServer) -> None:
    prefix = next(prefixes)
    async with stores(server, 1, prefix=prefix) as (store,):
        server.command("SET", f"{prefix}:{{a}}:requests", "not a hash")
        limits = Limits(requests_per_minute=1)
        for _ in range(5):
            broken = ask(limits, account="a")
            await store.reserve(broken)
            store.settle(broken.lease, 1)
        assert store.up
        assert (await store.reserve(ask(limits, account="b"))).refused is None
        assert (await store.reserve(ask(limits, account="b"))).refused == "requests"


# -- keys in Redis ----------------------------------------------------------------------------------------------------


async def test_keys_in_redis_are_accepted_and_stay_valid_without_it(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagemill_gateway.limits.redis.shared_keys.READ_INTERVAL_S", 0.02)
    monkeypatch.setattr("pagemill_gateway.limits.redis.shared_keys.MAX_READ_SHARE", 1.0)
    own_server.command("HSET", "p:keys", hash_key("one"), "tenant=a concurrency=2", "sk-plain-key", "tenant=b")
    ring = KeyRing([], shared=True)
    async with stores(own_server, 1, prefix="p") as (store,):
        keys = SharedKeys(store._link, ring.replace_shared)
        keys.start()
        await eventually(lambda: knows(ring, "one"))
        assert not knows(ring, "sk-plain-key")
        assert "1 of the keys in Redis are ignored" in caplog.text
        assert "sk-plain" not in caplog.text
        own_server.command("HSET", "p:keys", hash_key("two"), "")
        await eventually(lambda: knows(ring, "two"))
        own_server.command("HDEL", "p:keys", hash_key("one"))
        await eventually(lambda: not knows(ring, "one"))
        own_server.kill()
        await eventually(lambda: not store.up)
        assert knows(ring, "two")
        await keys.close()


async def test_changes_of_keys_in_redis_apply_within_a_second(own_server: RedisServer) -> None:
    """On an idle machine: they are read twice a second, and the reading takes milliseconds."""
    assert shared_keys.READ_INTERVAL_S <= 0.5
    ring = KeyRing([], shared=True)
    async with stores(own_server, 1, prefix="p") as (store,):
        keys = SharedKeys(store._link, ring.replace_shared)
        keys.start()
        own_server.command("HSET", "p:keys", hash_key("old"), "")
        await eventually(lambda: knows(ring, "old"))
        began_s = time.monotonic()
        own_server.command("HSET", "p:keys", hash_key("new"), "")
        own_server.command("HDEL", "p:keys", hash_key("old"))
        await eventually(lambda: knows(ring, "new") and not knows(ring, "old"))
        assert time.monotonic() - began_s < SOON_S
        await keys.close()


def knows(ring: KeyRing, key: str) -> bool:
    try:
        ring.authenticate({"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]})
    except PagemillError:
        return False
    return True

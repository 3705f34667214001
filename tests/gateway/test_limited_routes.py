"""Keys and limits as clients see them: headers, refusals, hidden models, and the cost of failures."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest
from redis_server import RedisServer, redis_server
from waiting import eventually

from pagemill_gateway.limits.limiter import used_tokens
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.refusals import duration
from pagemill_gateway.request_record import AttemptRecord, RequestRecord
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.request.generate import Usage
from pagemill_servers.auth import hash_key

KEY = {"Authorization": "Bearer sk-one"}
OTHER = {"Authorization": "Bearer sk-two"}


def entry(rest: str = "", key: str = "sk-one") -> str:
    return f"{hash_key(key)} {rest}".strip()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


async def test_a_plain_key_has_no_limits_and_no_headers_about_them(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[entry()])
    for _ in range(5):
        reply = await gateway.chat(headers=KEY)
        assert reply.status == 200
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.layouts
async def test_every_answer_states_the_remaining_limits(engines, gateways, stream) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("requests_per_minute=2 tokens_per_minute=1000")])
    headers = (await gateway.chat(headers=KEY, stream=stream, max_tokens=10)).headers
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    prompt = len("<user>hi<assistant>")
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - prompt - 10), "reserved tokens count"
    assert headers["x-ratelimit-reset-requests"].startswith(("1m", "59", "60"))
    headers = (await gateway.chat(headers=KEY, max_tokens=10)).headers
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - (prompt + 2) - (prompt + 10)), (
        "the first request is settled"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_knows_the_end_of_its_answer_when_no_process_counts_it_any_more(
    engines, gateways, monkeypatch, stream
) -> None:
    """So its next request is not refused, whichever worker, or gateway beside one Redis, gets it."""
    waiting, gate = asyncio.Event(), asyncio.Event()

    async def settled(store: MemoryStore) -> None:
        assert not store.num_held
        waiting.set()
        await gate.wait()

    monkeypatch.setattr(MemoryStore, "settled", settled)
    gateway = await gateways(engines[0], api_keys=[entry("concurrency=1")])
    answer = asyncio.create_task(gateway.chat(headers=KEY, stream=stream))
    await waiting.wait()
    # The next request finds room, and what it gets shows that the first client has had time to read.
    second = asyncio.create_task(gateway.chat(headers=KEY, stream=stream))
    await eventually(lambda: len(engines[0].requests) == 2)
    await gateway.get("/livez")
    assert not answer.done()
    gate.set()
    assert [(await each).status for each in (answer, second)] == [200, 200]


async def test_a_request_beyond_the_limit_is_refused_in_openais_format(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("requests_per_minute=1")])
    assert (await gateway.chat(headers=KEY)).status == 200
    for _ in range(3):
        reply = await gateway.chat(headers=KEY)
        assert reply.status == 429
        assert (reply.error["type"], reply.error["code"]) == ("requests", "rate_limit_exceeded")
        assert 1 <= int(reply.headers["retry-after"]) <= 61
        assert int(reply.headers["retry-after-ms"]) <= 61_000
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(engines[0].requests) == 1
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_limited_total{model="-",reason="requests",tenant="-"} 3.0' in text


async def test_a_repeated_refusal_needs_no_parsing(engines, gateways, monkeypatch) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("requests_per_minute=1")])
    monkeypatch.setattr("pagemill_gateway.limits.limiter.REMEMBER_REFUSAL_S", 60.0)
    assert (await gateway.chat(headers=KEY)).status == 200
    assert (await gateway.chat(headers=KEY)).status == 429

    async def prepare(*_: object) -> None:
        raise AssertionError("a refused request was parsed")

    monkeypatch.setattr(gateway.gateway.worker.preparation, "prepare", prepare)
    assert (await gateway.chat(headers=KEY)).status == 429


@pytest.mark.layouts
async def test_counting_tokens_is_a_request_that_costs_the_counted_tokens(engines, gateways, fake) -> None:
    keys = [entry("requests_per_minute=4 tokens_per_minute=1000 tokens_per_day=1000 tenant=a")]
    gateway = await gateways(engines[0], api_keys=keys)
    asked = (("/tokenize", {"prompt": "abc" * 100}, 200, 1000 - 76), ("/detokenize", {"tokens": [65] * 9}, 200, 691))
    asked = (*asked, ("/detokenize", {"tokens": [2**31 - 1]}, 400, 690))
    for num_before, (path, body, status, remaining_tokens) in enumerate(asked):
        reply = await gateway.post(path, {"model": "tiny", **body}, KEY)
        assert (reply.status, reply.headers["x-ratelimit-limit-requests"]) == (status, "4")
        assert reply.headers["x-ratelimit-remaining-requests"] == str(3 - num_before)
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(remaining_tokens), (
            "counting is settled with the reserved tokens"
        )
    assert (await gateway.post("/tokenize", {"model": "tiny", "prompt": 1}, KEY)).status == 400, "no engine may be used"
    headers = (await gateway.chat(headers=KEY, max_tokens=10)).headers
    assert headers["x-ratelimit-remaining-requests"] == "0"
    prompt = len("<user>hi<assistant>")
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 300 - 9 - prompt - 10), (
        "a refused request must cost nothing"
    )
    for path, body, *_ in asked:
        reply = await gateway.post(path, {"model": "tiny", **body}, KEY)
        assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "requests", "rate_limit_exceeded")
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(reply.headers["retry-after"]) <= 61


async def test_a_key_without_remaining_tokens_cannot_count_tokens(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("tokens_per_minute=1000 tenant=a"), entry(key="sk-two")])
    assert (await gateway.post("/tokenize", {"prompt": "a" * 995}, KEY)).json["count"] == 995
    for path, body in (("/tokenize", {"prompt": "a" * 40}), ("/detokenize", {"model": "tiny", "tokens": [65] * 11})):
        refused = await gateway.post(path, body, KEY)
        assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "tokens", "rate_limit_exceeded")
        assert "requested about 11." in refused.error["message"]
        assert (await gateway.post(path, body, OTHER)).status == 200, "a key without limits"


async def test_counting_tokens_occupies_a_slot_and_frees_it(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("concurrency=1 tenant=a"), entry(key="sk-two")])
    store = gateway.gateway.control.sharing.store
    assert isinstance(store, MemoryStore)
    engines[0].behaviour = fake.hangs
    running = asyncio.create_task(gateway.chat(headers=KEY))
    await fake.until(lambda: store.num_held == 1)
    refused = await gateway.post("/tokenize", {"prompt": "abc"}, KEY)
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
    assert (await gateway.post("/tokenize", {"prompt": "abc"}, OTHER)).status == 200, "a key without limits"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await fake.until(lambda: store.num_held == 0)
    for tokens, status in (([65], 200), ([2**31 - 1], 400), ([65], 200)):
        assert (await gateway.post("/detokenize", {"tokens": tokens}, KEY)).status == status
        assert store.num_held == 0


async def test_the_tokens_of_a_minute_are_limited(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("tokens_per_minute=100")])
    gate = asyncio.Event()
    engines[0].behaviour = waits(gate)
    running = asyncio.create_task(gateway.chat(headers=KEY, max_tokens=60))
    await fake.until(lambda: engines[0].requests)
    reply = await gateway.chat(headers=KEY, max_tokens=60)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "tokens", "rate_limit_exceeded")
    assert "Limit 100, remaining 21, requested about 79" in reply.error["message"]
    gate.set()
    assert (await running).status == 200
    assert (await gateway.chat(headers=KEY, max_tokens=60)).status == 200, "unused tokens must be returned"


async def test_a_prompt_larger_than_the_limit_is_refused_without_retry_after(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("tokens_per_minute=10")])
    reply = await gateway.chat(headers=KEY)
    assert (reply.status, reply.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in reply.headers
    assert "Request too large" in reply.error["message"]


async def test_an_exhausted_budget_is_an_insufficient_quota(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("tokens_per_month=30 tenant=a")])
    assert (await gateway.chat(headers=KEY, max_tokens=5)).status == 200
    reply = await gateway.chat(headers=KEY, max_tokens=5)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert reply.headers["x-should-retry"] == "false"
    assert int(reply.headers["retry-after"]) > 0


@pytest.mark.layouts
async def test_slots_are_freed_however_a_request_ends(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("concurrency=1")], max_attempts=1, ejection_base_s=0.01)
    store = gateway.gateway.control.sharing.store
    assert isinstance(store, MemoryStore)
    engines[0].behaviours.extend([fake.says("a"), fake.refuses(400, code="bad"), fake.refuses(500, code="bug")])
    assert (await gateway.chat(headers=KEY, stream=True)).status == 200
    assert (await gateway.chat(headers=KEY)).status == 400
    assert b"error" in (await gateway.chat(headers=KEY, stream=True)).raw
    await fake.until(lambda: store.num_held == 0)
    await gateway.know(engines[0])
    engines[0].behaviour = fake.hangs
    task = asyncio.create_task(gateway.chat(headers=KEY))
    await fake.until(lambda: store.num_held == 1)
    refused = await gateway.chat(headers=KEY)
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await fake.until(lambda: store.num_held == 0)
    assert (await gateway.chat(headers={**KEY, "x-request-timeout-s": "0.05"})).status == 504
    await fake.until(lambda: store.num_held == 0)


def test_the_cost_of_a_request_that_ends_early() -> None:
    record = RequestRecord(route="r", prompt_tokens=10)
    assert used_tokens(record, was_cut_short=False) == (0, 0)
    assert used_tokens(record, was_cut_short=True) == (0, 0), "no engine was contacted"
    record.attempts.append(AttemptRecord("e", "Cost", 0, 0.0))
    assert used_tokens(record, was_cut_short=False) == (0, 0), "the platform failed before the first token"
    assert used_tokens(record, was_cut_short=True) == (10, 0), "the client left while its prompt was computed"
    record.num_delivered = 3
    assert used_tokens(record, was_cut_short=False) == (10, 3)
    record.usage, record.finished = Usage(12, 5), True
    assert used_tokens(record, was_cut_short=False) == (12, 5)


async def test_models_that_a_key_may_not_use_do_not_exist_for_it(engines, gateways, fake) -> None:
    models = [
        msgspec.structs.replace(fake.catalog_of(engines[0]).models[0], name="mine", aliases=["nickname"]),
        msgspec.structs.replace(fake.catalog_of(engines[1]).models[0], deployment="e", name="secret-model"),
    ]
    keys = [entry("models=mine,gone"), entry(key="sk-two")]
    gateway = await gateways(engines[0], engines[1], api_keys=keys, catalog=Catalog(models=models))

    def names(reply) -> set[str]:
        return {card["id"] for card in reply.json["data"]}

    async def listed(headers) -> set[str]:
        async with gateway.session.get(gateway.url + "/v1/models", headers=headers) as response:
            return {card["id"] for card in (await response.json())["data"]}

    assert await listed(KEY) == {"mine"}
    assert await listed(OTHER) == {"mine", "nickname", "secret-model"}
    assert (await gateway.chat(model="mine", headers=KEY)).status == 200
    texts = set()
    for model in ("secret-model", "nickname", "never-was", "gone"):
        for reply in (
            await gateway.chat(model=model, headers=KEY),
            await gateway.complete(model=model, headers=KEY),
            await gateway.post("/tokenize", {"model": model, "prompt": "a"}, KEY),
        ):
            assert (reply.status, reply.error["code"]) == (404, "model_not_found")
            texts.add(reply.error["message"].replace(model, "MODEL"))
    assert len(texts) == 1, "the refusal must not show whether a model exists"
    assert not engines[1].requests
    assert (await gateway.chat(model="secret-model", headers=OTHER)).status == 200
    async with gateway.session.get(gateway.url + "/v1/models/secret-model", headers=KEY) as response:
        assert response.status == 404
    assert (await gateway.post("/tokenize", {"prompt": "a"}, KEY)).status == 200, "the only model of this key"


@pytest.mark.layouts
async def test_no_key_can_read_metrics_of_all_tenants(engines, gateways) -> None:
    keys = [entry("tenant=a"), entry(key="sk-two")]
    gateway = await gateways(engines[0], api_keys=keys)
    await gateway.chat(headers=KEY)
    for headers in ({}, KEY, OTHER):
        async with gateway.session.get(gateway.url + "/metrics", headers=headers) as response:
            assert response.status == 404
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_tenant_tokens_total{kind="completion",model="tiny",tenant="a"} 2.0' in text


async def test_prefix_caches_are_shared_within_a_tenant_or_only_within_a_key(engines, gateways, fake) -> None:
    keys = [entry("tenant=a"), entry("tenant=a", "sk-two"), entry("tenant=b", "sk-three"), entry(key="sk-four")]
    salts: dict[str, list[str]] = {}
    for engine, scope in zip(engines, ("tenant", "key", "deployment"), strict=True):
        gateway = await gateways(engine, api_keys=keys, catalog=fake.catalog_of(engine, prefix_scope=scope))
        for key in ("sk-one", "sk-two", "sk-three", "sk-four"):
            await gateway.chat(headers={"Authorization": f"Bearer {key}"})
        salts[scope] = [request.cache_salt for request in engine.requests]
    one, two, three, four = salts["tenant"]
    assert one == two
    assert len({one, three, four, ""}) == 4
    assert len({*salts["key"], ""}) == 5
    assert set(salts["deployment"]) == {""}


@pytest.mark.layouts
async def test_tenants_are_separated_by_default_and_no_answer_reveals_the_requests_of_others(engines, gateways) -> None:
    """The number of a decision counts the decisions of all tenants, so it is in the log and not in a key's answers."""
    gateway = await gateways(engines[0], api_keys=[entry("tenant=a"), entry("tenant=b", "sk-two")])
    answers = [await gateway.chat(headers=headers) for headers in (KEY, OTHER)]
    one, two = (request.cache_salt for request in engines[0].requests)
    assert len({one, two, ""}) == 3
    routes = [answer.headers["x-pagemill-route"].split("; ") for answer in answers]
    assert [[part.partition("=")[0] for part in route[2:]] for route in routes] == [["cached"], ["cached"]]


async def test_the_log_names_the_tenant_and_never_the_key(engines, gateways, fake, caplog) -> None:
    caplog.set_level(logging.INFO)
    gateway = await gateways(engines[0], api_keys=[entry("tenant=team-a requests_per_minute=1")])
    await gateway.chat(headers=KEY)
    await gateway.chat(headers=KEY)

    def tenants() -> list[str]:
        lines = [record.message for record in caplog.records if record.name == "pagemill.gateway.access"]
        return [msgspec.json.decode(line)["tenant"] for line in lines]

    await fake.until(lambda: tenants() == ["team-a", "team-a"])  # the line is written after the answer's last byte
    assert "sk-one" not in caplog.text
    assert hash_key("sk-one") not in caplog.text


async def test_the_class_of_a_key_orders_its_requests(engines, gateways) -> None:
    keys = [entry("priority=low"), entry("priority=high", "sk-two")]
    gateway = await gateways(engines[0], api_keys=keys)
    await gateway.chat(headers=KEY, priority=-1000000)
    await gateway.complete(headers=OTHER, prompt=["a", "b"])
    low, *high = (request.priority for request in engines[0].requests)
    assert all(each < 0 < low for each in high)


async def test_the_openai_client_understands_the_refusal(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[entry("requests_per_minute=1")])
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-one", max_retries=0) as client:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        raw = await client.chat.completions.with_raw_response.create(**ask)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**ask)
        assert caught.value.code == "rate_limit_exceeded"


async def test_two_gateways_with_one_redis_share_a_limit_and_fail_no_request_without_it(
    engines, gateways, server, fake
) -> None:
    settings = {
        "api_keys": [entry("requests_per_minute=20 tokens_per_minute=100000 tenant=a")],
        "redis": {"url": server.url, "timeout_ms": 10_000.0},
    }
    one, two = [await start_shared(gateways, engines[0], settings) for _ in range(2)]
    await fake.until(lambda: all(each.gateway.control.sharing.up for each in (one, two)))
    replies = await asyncio.gather(*(each.chat(headers=KEY) for _ in range(15) for each in (one, two)))
    pages = [(await each.get("/metrics", control=True)).raw.decode() for each in (one, two)]
    assert "pagemill_gateway_redis_up 1.0" in pages[0]
    # A connection that a busy machine opens too late is a limit that a gateway decides by its own share.
    num_alone = sum(int(found) for page in pages for found in re.findall(r"limits_decided_alone_total (\d+)", page))
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) == {200, 429}
    assert 20 <= statuses[200] <= 20 + num_alone


@pytest.mark.slow
async def test_a_restart_of_redis_under_load_causes_no_error(engines, gateways, server, fake) -> None:
    settings = {
        "api_keys": [entry("requests_per_minute=1000000 tokens_per_minute=100000000 concurrency=1000 tenant=a")],
        "redis": {"url": server.url},
    }
    gateway = await start_shared(gateways, engines[0], settings)
    await fake.until(lambda: gateway.gateway.control.sharing.up)
    statuses: list[int] = []
    done = asyncio.Event()

    async def load() -> None:
        while not done.is_set():
            statuses.append((await gateway.chat(headers=KEY)).status)
            await asyncio.sleep(0.02)  # most of the time is the start of Redis

    clients = [asyncio.create_task(load()) for _ in range(4)]
    await fake.until(lambda: len(statuses) > 20, progress=lambda: len(statuses))
    await asyncio.to_thread(server.kill)
    await fake.until(lambda: not gateway.gateway.control.sharing.up)
    so_far = len(statuses)
    await fake.until(lambda: len(statuses) > so_far + 20, progress=lambda: len(statuses))
    assert "pagemill_gateway_redis_up 0.0" in (await gateway.get("/metrics", control=True)).raw.decode()
    await asyncio.to_thread(server.start)
    await fake.until(lambda: gateway.gateway.control.sharing.up)
    so_far = len(statuses)
    await fake.until(lambda: len(statuses) > so_far + 20, progress=lambda: len(statuses))
    done.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    store = gateway.gateway.control.sharing.store
    await fake.until(lambda: store.num_unpublished == 0 and store.local.num_held == 0)
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert "pagemill_gateway_limits_decided_alone_total" in text


async def start_shared(gateways, engine, settings):
    from pagemill_gateway.config import RedisConfig

    return await gateways(engine, **{**settings, "redis": RedisConfig(**settings["redis"])})


def waits(gate: asyncio.Event):
    async def behave(engine, request, response, http) -> None:
        await gate.wait()
        engine.behaviour = type(engine)("").behaviour
        await engine.behaviour(engine, request, response, http)

    return behave


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.999, "59.999s"), (60, "1m0s"), (10_921, "3h2m1s")],
)
def test_durations_are_written_in_openais_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text

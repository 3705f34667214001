"""Responses that a gateway stores: continuing, reading and deleting them, and access by tenant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis_server import RedisServer, redis_server
from response_answers import answers, prompt_of

from pagemill_gateway.config import GatewayConfig, RedisConfig, SettingsError, StoredResponsesConfig
from pagemill_gateway.stored_responses.store import MemoryResponses
from pagemill_servers.auth import hash_key

STORES: dict[str, Any] = {"stored_responses": StoredResponsesConfig()}
ONE, TWO, OTHER = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two", "other"))
TENANTS = [f"{hash_key('sk-one')} tenant=a", f"{hash_key('sk-two')} tenant=a", f"{hash_key('sk-other')} tenant=b"]


async def respond(gateway: Any, text: str = "hi", headers: Any = None, **fields: Any) -> Any:
    return await gateway.post("/v1/responses", {"model": "tiny", "input": text, **fields}, headers)


async def fetch(gateway: Any, path: str, headers: Any = None, method: str = "GET") -> tuple[int, Any]:
    async with gateway.session.request(method, f"{gateway.url}/v1/responses/{path}", headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.layouts
async def test_a_response_continues_the_previous_one(engines, gateways) -> None:
    engine = engines[0]
    gateway = await gateways(engine, **STORES)
    engine.behaviour = answers("one")
    first = (await respond(gateway, "a", instructions="brief")).json
    engine.behaviour = answers("two")
    second = (await respond(gateway, "b", previous_response_id=first["id"])).json
    assert prompt_of(engine) == "<user>a<assistant>one<user>b<assistant>", "instructions belong to one request only"
    assert (second["previous_response_id"], second["store"]) == (first["id"], True)
    await respond(gateway, "c", previous_response_id=second["id"])
    assert prompt_of(engine) == "<user>a<assistant>one<user>b<assistant>two<user>c<assistant>"


@pytest.mark.layouts
async def test_a_response_can_be_read_with_its_input_until_it_is_deleted(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = answers("one")
    first = (await respond(gateway, "a")).json
    second = (await respond(gateway, "b", previous_response_id=first["id"])).json
    assert await fetch(gateway, second["id"]) == (200, second)
    status, items = await fetch(gateway, f"{second['id']}/input_items?order=asc")
    assert (status, items["has_more"]) == (200, False)
    assert [(item["role"], item["content"][0]["text"]) for item in items["data"]] == [
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
    ]
    after = items["data"][0]["id"]
    page = (await fetch(gateway, f"{second['id']}/input_items?order=asc&limit=1&after={after}"))[1]
    assert (page["data"], page["has_more"]) == ([items["data"][1]], True)
    assert (await fetch(gateway, second["id"], method="DELETE"))[1]["deleted"] is True
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        status, body = await fetch(gateway, second["id"] + path, method=method)
        assert (status, body["error"]["code"]) == (404, "response_not_found")


async def test_the_stored_response_of_a_stream_equals_the_stream(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = answers("event: response.completed\n\ndata: {}")
    streamed = await respond(gateway, stream=True)
    last = json.loads(streamed.raw.rstrip().rpartition(b"\ndata: ")[2])
    assert last["type"] == "response.completed"
    assert await fetch(gateway, last["response"]["id"]) == (200, last["response"])


async def test_a_response_with_store_false_is_not_stored(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = answers("one")
    body = (await respond(gateway, store=False)).json
    assert body["store"] is False
    assert (await fetch(gateway, body["id"]))[0] == 404
    refused = await respond(gateway, previous_response_id=body["id"])
    assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
    assert refused.error["param"] == "previous_response_id"


async def test_a_response_of_another_tenant_does_not_exist(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=TENANTS, **STORES)
    engines[0].behaviour = answers("one")
    body = (await respond(gateway, headers=ONE)).json
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        foreign = await fetch(gateway, body["id"] + path, OTHER, method)
        unknown = await fetch(gateway, "resp_x" + path, OTHER, method)
        assert foreign[0] == 404
        assert json.dumps(foreign[1]).replace(body["id"], "resp_x") == json.dumps(unknown[1])
    assert (await respond(gateway, headers=OTHER, previous_response_id=body["id"])).status == 404
    assert (await respond(gateway, headers=TWO, previous_response_id=body["id"])).status == 200, (
        "another key of the same tenant"
    )
    assert (await fetch(gateway, body["id"]))[0] == 401


async def test_without_the_setting_no_response_is_stored_and_errors_name_it(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    body = (await respond(gateway)).json
    assert body["store"] is False
    status, shown = await fetch(gateway, body["id"])
    assert (status, shown["error"]["code"]) == (404, "responses_not_stored")
    refused = await respond(gateway, previous_response_id=body["id"])
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    for message in (shown["error"]["message"], refused.error["message"]):
        assert "`stored_responses`" in message


async def test_stored_responses_are_limited_in_age_number_and_bytes() -> None:
    now = 0.0
    store = MemoryResponses(StoredResponsesConfig(max_age_s=10, max_per_tenant=3, max_bytes=100), clock=lambda: now)
    for number in range(4):
        await store.keep("a", f"resp_{number}", b"x" * 10)
    assert await store.get("a", "resp_0") is None, "the oldest of four must be removed"
    await store.keep("b", "resp_0", b"y" * 75)
    assert [await store.get("a", f"resp_{number}") for number in (1, 2, 3)] == [b"x" * 10] * 3, (
        "responses below the limit must stay"
    )
    assert await store.get("b", "resp_0") is None, "105 bytes: the tenant with the most bytes must lose its own"
    now = 10.0
    assert await store.get("a", "resp_3") is None
    assert not await store.remove("a", "resp_3")


async def test_a_response_too_large_to_store_is_still_answered(engines, gateways) -> None:
    gateway = await gateways(engines[0], stored_responses=StoredResponsesConfig(max_response_bytes=500))
    engines[0].behaviour = answers("x" * 1000)
    reply = await respond(gateway)
    assert reply.status == 200
    assert (await fetch(gateway, reply.json["id"]))[0] == 404


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"stored_responses\.max_bytes: 0 must be above 0"):
        GatewayConfig(stored_responses=StoredResponsesConfig(max_bytes=0)).checked()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


async def test_gateways_with_one_redis_share_responses(engines, gateways, fake, server, tmp_path: Path) -> None:
    redis = RedisConfig(url=server.url, prefix="shared", timeout_ms=10_000)
    settings = {"redis": redis, "stored_responses": StoredResponsesConfig(max_per_tenant=2)}
    one, other = await gateways(engines[0], **settings), await gateways(engines[0], **settings)
    await fake.until(lambda: one.gateway.control.sharing.up and other.gateway.control.sharing.up)
    engines[0].behaviour = answers("one")
    bodies = [(await respond(one, "a")).json for _ in range(3)]
    assert (await respond(other, "b", previous_response_id=bodies[2]["id"])).status == 200
    assert prompt_of(engines[0]) == "<user>a<assistant>one<user>b<assistant>"
    assert (await fetch(other, bodies[0]["id"]))[0] == 404, "the oldest of three must be removed"
    assert (await fetch(other, bodies[2]["id"], method="DELETE"))[0] == 200
    assert (await fetch(one, bodies[2]["id"]))[0] == 404


async def test_without_redis_answers_are_returned_and_stored_ones_are_unavailable(engines, gateways) -> None:
    redis = RedisConfig(url="redis://127.0.0.1:1")
    gateway = await gateways(engines[0], redis=redis, **STORES)
    engines[0].behaviour = answers("one")
    body = (await respond(gateway)).json
    status, shown = await fetch(gateway, body["id"])
    assert (status, shown["error"]["code"]) == (503, "store_unavailable")


async def test_other_methods_on_a_stored_response_are_refused(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    async with aiohttp.ClientSession() as session, session.put(f"{gateway.url}/v1/responses/resp_1") as reply:
        assert reply.status == 405

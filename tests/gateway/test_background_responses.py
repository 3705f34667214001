"""Responses that are generated without a client: begun, read until they are complete, cancelled, and lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from response_answers import answers, prompt_of
from waiting import WAIT_LIMIT_S

from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.routes.stored import background
from pagemill_servers.auth import hash_key

STORES: dict[str, Any] = {"stored_responses": StoredResponsesConfig()}
ONE, OTHER = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "other"))
TENANTS = [f"{hash_key('sk-one')} tenant=a", f"{hash_key('sk-other')} tenant=b"]


async def begin(gateway: Any, text: str = "hi", headers: Any = None, **fields: Any) -> Any:
    return await gateway.post("/v1/responses", {"model": "tiny", "input": text, "background": True, **fields}, headers)


async def read(gateway: Any, response_id: str, suffix: str = "", headers: Any = None, method: str = "GET") -> Any:
    url = f"{gateway.url}/v1/responses/{response_id}{suffix}"
    async with gateway.session.request(method, url, headers=headers) as reply:
        return reply.status, await reply.json()


async def ended(gateway: Any, response_id: str, headers: Any = None) -> Any:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            _, found = await read(gateway, response_id, headers=headers)
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.02)


@pytest.mark.layouts
async def test_a_response_is_generated_after_its_client_has_the_id(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = answers("one")
    begun = (await begin(gateway, "a", instructions="brief")).json
    assert (begun["status"], begun["background"], begun["output"], begun["usage"]) == ("queued", True, [], None)
    found = await ended(gateway, begun["id"])
    assert (found["status"], found["id"], found["background"], found["store"]) == ("completed", begun["id"], True, True)
    assert found["output"][0]["content"][0]["text"] == "one"
    assert found["instructions"] == begun["instructions"] == "brief"
    _, items = await read(gateway, begun["id"], "/input_items")
    assert items["data"][0]["content"][0]["text"] == "a"
    engines[0].behaviour = answers("two")
    second = (await begin(gateway, "b", previous_response_id=begun["id"])).json
    assert (await ended(gateway, second["id"]))["output"][0]["content"][0]["text"] == "two"
    assert prompt_of(engines[0]) == "<user>a<assistant>one<user>b<assistant>"
    assert (await read(gateway, begun["id"], method="DELETE"))[0] == 200
    assert (await read(gateway, begun["id"]))[0] == 404


@pytest.mark.layouts
async def test_a_cancelled_response_ends_in_its_engine(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = fake.says("a", "b", gate=asyncio.Event())
    begun = (await begin(gateway)).json
    await fake.until(lambda: len(engines[0].requests) == 1)
    status, refused = await read_post(gateway, begun["id"])
    assert (status, refused["error"]["param"]) == (400, "previous_response_id"), "it is not complete yet"
    status, found = await read(gateway, begun["id"], "/cancel", method="POST")
    assert (status, found["status"]) == (200, "cancelled")
    await fake.until(lambda: engines[0].num_aborted == 1)
    assert (await read(gateway, begun["id"]))[1]["status"] == "cancelled"
    assert (await read(gateway, begun["id"], "/cancel", method="POST"))[1]["status"] == "cancelled", "once more"
    assert (await read(gateway, f"cancelled_{begun['id']}"))[0] == 404
    assert (await read(gateway, begun["id"], method="DELETE"))[0] == 200
    assert (await read(gateway, begun["id"]))[0] == 404


async def test_a_worker_that_still_writes_does_not_undo_a_cancellation(engines, gateways, fake) -> None:
    """It says that it generates the response, at the moment at which another worker cancels it."""
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = fake.says("a", gate=asyncio.Event())
    begun = (await begin(gateway)).json
    store = gateway.gateway.control
    await fake.until(lambda: len(engines[0].requests) == 1)
    ((account, kept),) = store._responses._kept.items()
    written = kept[begun["id"]].value
    assert (await read(gateway, begun["id"], "/cancel", method="POST"))[1]["status"] == "cancelled"
    await store.keep_response(account, begun["id"], written)
    assert (await read(gateway, begun["id"]))[1]["status"] == "cancelled"
    await fake.until(lambda: engines[0].num_aborted == 1)
    assert (await read(gateway, begun["id"]))[1]["status"] == "cancelled"


async def read_post(gateway: Any, previous: str) -> tuple[int, Any]:
    reply = await gateway.post("/v1/responses", {"model": "tiny", "input": "b", "previous_response_id": previous})
    return reply.status, reply.json


async def test_a_failure_is_the_error_of_the_response(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = fake.refuses(400, message="No.", code="invalid_value")
    found = await ended(gateway, (await begin(gateway)).json["id"])
    assert (found["status"], found["error"]) == ("failed", {"code": "invalid_value", "message": "No."})
    small = await gateways(engines[0], stored_responses=StoredResponsesConfig(max_response_bytes=1100))
    engines[0].behaviour = answers("x" * 3000)
    found = await ended(small, (await begin(small)).json["id"])
    assert found["status"] == "failed"
    assert "max_response_bytes" in found["error"]["message"]


async def test_only_its_tenant_reads_and_cancels_a_response(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=TENANTS, **STORES)
    engines[0].behaviour = answers("one")
    begun = (await begin(gateway, headers=ONE)).json
    assert (await read(gateway, begun["id"], headers=OTHER))[0] == 404
    assert (await read(gateway, begun["id"], "/cancel", headers=OTHER, method="POST"))[0] == 404
    assert (await ended(gateway, begun["id"], ONE))["status"] == "completed"


async def test_what_does_not_go_with_the_background_is_refused_by_name(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    for fields, param in (({"stream": True}, "stream"), ({"store": False}, "store"), ({"max_output_tokens": 0}, None)):
        refused = await begin(gateway, **fields)
        assert refused.status == 400
        assert refused.error["param"] == (param or "max_output_tokens")
    engines[0].behaviour = answers("one")
    live = (await gateway.post("/v1/responses", {"model": "tiny", "input": "a", "background": False})).json
    assert (live["status"], live["background"]) == ("completed", False)
    status, refused = await read(gateway, live["id"], "/cancel", method="POST")
    assert (status, "background" in refused["error"]["message"]) == (400, True)
    without = await gateways(engines[0])
    assert (await begin(without)).error["param"] == "background"


async def test_a_response_that_no_worker_generates_any_more_has_failed(engines, gateways, fake, monkeypatch) -> None:
    gateway = await gateways(engines[0], **STORES)
    engines[0].behaviour = fake.says("a", "b", gate=asyncio.Event())
    begun = (await begin(gateway)).json
    await fake.until(lambda: len(engines[0].requests) == 1)
    monkeypatch.setattr(background, "LOST_S", -1.0)
    _, found = await read(gateway, begun["id"])
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")

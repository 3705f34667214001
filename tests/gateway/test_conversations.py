"""Conversations that a gateway stores: responses continue and extend them; they are read, changed and deleted."""

from __future__ import annotations

from typing import Any

import pytest
from response_answers import answers, prompt_of

from pagemill_gateway.config import StoredResponsesConfig
from pagemill_servers.auth import hash_key

STORES: dict[str, Any] = {"stored_responses": StoredResponsesConfig()}
USER = {"role": "user", "content": "a"}


async def call(gateway: Any, path: str, body: Any = None, method: str = "", headers: Any = None) -> tuple[int, Any]:
    method = method or ("GET" if body is None else "POST")
    url = f"{gateway.url}/v1/conversations{path}"
    async with gateway.session.request(method, url, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


async def respond(gateway: Any, text: str, **fields: Any) -> Any:
    return await gateway.post("/v1/responses", {"model": "tiny", "input": text, **fields})


def texts(listing: Any) -> list[str]:
    return [item["content"][0]["text"] for item in listing["data"]]


@pytest.mark.layouts
async def test_responses_continue_and_extend_a_conversation(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    status, made = await call(gateway, "", {"items": [USER], "metadata": {"k": "v"}})
    assert (status, made["object"], made["metadata"]) == (200, "conversation", {"k": "v"})
    engines[0].behaviour = answers("one")
    first = (await respond(gateway, "b", conversation=made["id"], store=False)).json
    assert first["conversation"] == {"id": made["id"]}
    assert prompt_of(engines[0]) == "<user>a<user>b<assistant>"
    engines[0].behaviour = answers("two")
    assert (await respond(gateway, "c", conversation={"id": made["id"]}, stream=True)).status == 200
    assert prompt_of(engines[0]) == "<user>a<user>b<assistant>one<user>c<assistant>"
    _, listing = await call(gateway, f"/{made['id']}/items?order=asc")
    assert texts(listing) == ["a", "b", "one", "c", "two"]
    assert len({item["id"] for item in listing["data"]}) == 5


async def test_a_conversation_is_read_changed_and_deleted(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    _, made = await call(gateway, "", {})
    path = f"/{made['id']}"
    assert await call(gateway, path) == (200, made)
    assert (await call(gateway, path, {"metadata": {"x": "y"}}))[1]["metadata"] == {"x": "y"}
    _, added = await call(gateway, f"{path}/items", {"items": [USER, {"role": "assistant", "content": "b"}]})
    assert texts(added) == ["a", "b"]
    first, last = added["data"]
    assert await call(gateway, f"{path}/items/{first['id']}") == (200, first)
    assert (await call(gateway, f"{path}/items/{first['id']}", method="DELETE"))[1]["metadata"] == {"x": "y"}
    assert (await call(gateway, f"{path}/items"))[1]["data"] == [last]
    assert (await call(gateway, f"{path}/items/{first['id']}"))[1]["error"]["code"] == "item_not_found"
    assert (await call(gateway, path, method="DELETE"))[1] == {
        "id": made["id"],
        "object": "conversation.deleted",
        "deleted": True,
    }
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
        status, body = await call(gateway, path + suffix, method=method)
        assert (status, body["error"]["code"]) == (404, "conversation_not_found")
    refused = await respond(gateway, "c", conversation=made["id"])
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        *(404, "conversation_not_found"),
        "conversation",
    )


async def test_conversations_and_responses_are_apart_and_belong_to_an_account(engines, gateways) -> None:
    keys = [f"{hash_key('sk-one')} tenant=a", f"{hash_key('sk-other')} tenant=b"]
    gateway = await gateways(engines[0], api_keys=keys, **STORES)
    one, other = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "other"))
    _, made = await call(gateway, "", {}, headers=one)
    assert (await call(gateway, f"/{made['id']}", headers=one))[0] == 200
    assert (await call(gateway, f"/{made['id']}", headers=other))[0] == 404
    assert (await call(gateway, f"/{made['id']}", headers=other, method="DELETE"))[0] == 404
    for method in ("GET", "DELETE"):
        url = f"{gateway.url}/v1/responses/{made['id']}"
        async with gateway.session.request(method, url, headers=one) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "response_not_found")
    assert (await call(gateway, f"/{made['id']}", headers=one))[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": 5}, "items"),
        ({"items": [{"role": "robot", "content": "a"}]}, "items[0].role"),
        ({"items": [USER, {"type": "function_call", "name": "f"}]}, "items[1].call_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
async def test_what_is_wrong_is_named(engines, gateways, body, param) -> None:
    status, answer = await call(await gateways(engines[0], **STORES), "", body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_conversation_excludes_a_previous_response_and_needs_a_store(engines, gateways) -> None:
    gateway = await gateways(engines[0], **STORES)
    refused = await respond(gateway, "a", conversation="conv_1", previous_response_id="resp_1")
    assert (refused.status, refused.error["param"]) == (400, "conversation")
    gateway = await gateways(engines[0])
    assert (await respond(gateway, "a", conversation="conv_1")).error["param"] == "conversation"
    assert (await call(gateway, "", {}))[1]["error"]["code"] == "responses_not_stored"


async def test_a_conversation_that_would_be_too_large_is_not_extended(engines, gateways, caplog) -> None:
    gateway = await gateways(engines[0], stored_responses=StoredResponsesConfig(max_response_bytes=900))
    _, made = await call(gateway, "", {"items": [USER]})
    engines[0].behaviour = answers("x" * 2000)
    assert (await respond(gateway, "b", conversation=made["id"], store=False)).status == 200
    assert texts((await call(gateway, f"/{made['id']}/items"))[1]) == ["a"]
    assert (await call(gateway, f"/{made['id']}/items", {"items": [{**USER, "content": "x" * 2000}]}))[0] == 413

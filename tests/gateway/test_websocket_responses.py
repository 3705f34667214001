"""`/v1/responses` over a WebSocket: the events of HTTP as messages, one response after the other, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from response_answers import answers, prompt_of
from waiting import WAIT_LIMIT_S
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.routes.websocket import connection as bounds
from pagemill_gateway.routes.websocket.turn import EventMessages
from pagemill_servers.auth import hash_key

KEY = {"Authorization": "Bearer sk-one"}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


def socket_url(gateway: Any) -> str:
    return f"{gateway.url.replace('http://', 'ws://')}/v1/responses"


async def create(socket: ClientConnection, text: Any = "hi", **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "model": "tiny", "input": text, **fields}))


async def received(socket: ClientConnection) -> list[Any]:
    """Return the messages up to the last one of a response."""
    found: list[Any] = []
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not found or found[-1]["type"] not in LAST:
            found.append(json.loads(await socket.recv()))
    return found


async def answer_to(socket: ClientConnection, text: Any = "hi", **fields: Any) -> Any:
    """Return the last message of a response."""
    await create(socket, text, **fields)
    return (await received(socket))[-1]


async def closed(socket: ClientConnection) -> tuple[int, str]:
    """Return why the gateway closes."""
    with contextlib.suppress(ConnectionClosed):
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                await socket.recv()
    return socket.close_code or 0, socket.close_reason or ""


@pytest.mark.layouts
async def test_messages_are_the_events_of_http(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    reply = await gateway.post("/v1/responses", {"model": "tiny", "input": "hi", "stream": True})
    by_http = [json.loads(each.partition("data: ")[2]) for each in reply.raw.decode().split("\n\n") if "data: " in each]
    async with connect(socket_url(gateway)) as socket:
        await create(socket)
        by_socket = await received(socket)
    assert [each["type"] for each in by_socket] == [each["type"] for each in by_http]
    assert [each["sequence_number"] for each in by_socket] == list(range(len(by_http)))
    assert by_socket[-1]["response"]["output"][0]["content"][0]["text"] == "one"


@pytest.mark.layouts
@pytest.mark.parametrize("stored", [None, StoredResponsesConfig()])
@pytest.mark.parametrize("store", [True, False])
async def test_a_response_continues_the_last_one(engines, gateways, stored: Any, store: bool) -> None:
    gateway = await gateways(engines[0], stored_responses=stored)
    async with connect(socket_url(gateway)) as socket:
        engines[0].behaviour = answers("one")
        first = await answer_to(socket, "a", store=store)
        engines[0].behaviour = answers("two")
        second = await answer_to(socket, "b", store=store, previous_response_id=first["response"]["id"])
        assert prompt_of(engines[0]) == "<user>a<assistant>one<user>b<assistant>"
        assert second["response"]["previous_response_id"] == first["response"]["id"]
        assert second["response"]["store"] is (store and stored is not None)
        await answer_to(socket, "c", previous_response_id=second["response"]["id"])
        assert prompt_of(engines[0]) == "<user>a<assistant>one<user>b<assistant>two<user>c<assistant>"
        old = await answer_to(socket, "d", previous_response_id=first["response"]["id"])
    if store and stored is not None:
        assert old["type"] == "response.completed", "any stored response can be continued"
    else:
        assert (old["type"], old["error"]["code"]) == ("error", "previous_response_not_found")


async def test_another_connection_and_another_tenant_cannot_continue_it(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    async with connect(socket_url(gateway)) as socket, connect(socket_url(gateway)) as other:
        first = await answer_to(socket, "secret")
        refused = await answer_to(other, "b", previous_response_id=first["response"]["id"])
        assert refused["error"]["code"] == "previous_response_not_found"
        assert (await answer_to(other, "c"))["type"] == "response.completed", "the connection goes on"


async def test_a_turn_without_generation_prepares_the_next_one(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    async with connect(socket_url(gateway)) as socket:
        await create(socket, "a", generate=False, store=False)
        events = await received(socket)
        assert [each["type"] for each in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["output"], warm["usage"]["total_tokens"], engines[0].requests) == ([], 0, [])
        done = await answer_to(socket, "b", previous_response_id=warm["id"])
        assert done["type"] == "response.completed"
    assert prompt_of(engines[0]) == "<user>a<user>b<assistant>"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (b"{", None),
        (b"[]", "type"),
        (b'{"type": "response.append"}', "type"),
        (b'{"type": "response.create", "model": "tiny", "input": "a", "stream_id": "x"}', "stream_id"),
        (b'{"type": "response.create", "model": "tiny", "input": "a", "background": true}', "background"),
        (b'{"type": "response.create", "model": "tiny", "input": "a", "generate": 1}', "generate"),
        (b'{"type": "response.create", "model": "tiny", "input": 3}', "input"),
        (b'{"type": "response.create", "model": "other", "input": "a"}', "model"),
        (b'{"type": "response.create", "input": ' + b"[" * 500 + b"]" * 500 + b"}", "input"),
    ],
)
async def test_an_error_is_a_message_and_the_connection_goes_on(
    engines, gateways, message: bytes, param: str | None
) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    async with connect(socket_url(gateway)) as socket:
        await socket.send(message, text=True)
        (refused,) = await received(socket)
        assert (refused["type"], (refused["error"]["param"] or "").partition("[")[0]) == ("error", param or "")
        assert 400 <= refused["status"] < 500
        assert (await answer_to(socket))["type"] == "response.completed"


async def test_fields_without_effect_are_named(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    async with connect(socket_url(gateway)) as socket:
        await create(socket, mine=1, service_tier="flex")
        events = await received(socket)
    assert events[0] == {"type": "pagemill.unread_fields", "fields": ["mine", "service_tier"]}


@pytest.mark.layouts
async def test_a_client_that_leaves_ends_its_response(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = fake.says("a", "b", gate=asyncio.Event())
    async with connect(socket_url(gateway)) as socket:
        await create(socket)
        await fake.until(lambda: len(engines[0].requests) == 1)
        socket.transport.abort()
        await fake.until(lambda: engines[0].num_aborted == 1)


async def test_one_message_waits_for_the_end_of_a_response_and_more_are_refused(engines, gateways, fake) -> None:
    gateway, gate = await gateways(engines[0]), asyncio.Event()
    engines[0].behaviours.append(answers("one", gate))
    engines[0].behaviour = answers("two")
    async with connect(socket_url(gateway)) as socket:
        await create(socket)
        await fake.until(lambda: len(engines[0].requests) == 1)
        await create(socket, "b")
        await create(socket, "c")
        refused = (await received(socket))[-1]
        assert (refused["status"], refused["error"]["code"]) == (409, "response_already_in_flight")
        gate.set()
        assert (await received(socket))[-1]["response"]["output"][0]["content"][0]["text"] == "one"
        assert (await received(socket))[-1]["response"]["output"][0]["content"][0]["text"] == "two"
        assert prompt_of(engines[0]) == "<user>b<assistant>"


async def test_a_client_that_floods_is_disconnected(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = fake.says("a", "b", gate=asyncio.Event())
    async with connect(socket_url(gateway)) as socket:
        with contextlib.suppress(ConnectionClosed):  # before the last ones are sent
            for _ in range(bounds.MAX_REFUSED + 4):
                await create(socket)
        assert (await closed(socket))[0] == 1008
        await fake.until(lambda: engines[0].num_aborted == len(engines[0].requests))
    async with connect(socket_url(gateway)) as socket:
        socket.transport.write(b"\x89\x80\0\0\0\0" * 200_000)  # pings
        assert (await closed(socket))[0] == 1008, "frames of a few bytes"


async def test_a_message_has_the_limits_of_a_body(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], max_body_bytes=100_000, body_timeout_s=0.5)
    async with connect(socket_url(gateway)) as socket:
        await create(socket, "x" * 100_000)
        assert (await closed(socket))[0] == 1009
    async with connect(socket_url(gateway)) as socket:
        sending = asyncio.create_task(socket.send(_slowly()))
        assert (await closed(socket))[0] == 1008
        sending.cancel()
    limit = gateway.gateway.worker.in_flight_limit
    await fake.until(lambda: (limit.num_in_flight, limit.num_bytes) == (0, 0))


async def _slowly() -> Any:
    yield "x" * 20_000
    await asyncio.Event().wait()


async def test_unfinished_messages_count_in_the_memory_of_requests(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], max_body_bytes=200_000, max_in_flight_body_bytes=200_000)
    limit = gateway.gateway.worker.in_flight_limit

    async def begun() -> Any:
        yield "x" * 120_000
        await asyncio.Event().wait()

    async with connect(socket_url(gateway)) as socket, connect(socket_url(gateway)) as other:
        sending = [asyncio.create_task(socket.send(begun()))]
        await fake.until(lambda: limit.num_bytes >= 120_000)
        sending.append(asyncio.create_task(other.send(begun())))
        refused = json.loads(await other.recv())
        assert refused["status"] == 503
        assert (await closed(other))[0] == 1013
        for each in sending:
            each.cancel()
    await fake.until(lambda: (limit.num_bytes, limit.num_in_flight) == (0, 0))


async def test_an_idle_connection_is_closed(engines, gateways) -> None:
    gateway = await gateways(engines[0], websocket_idle_timeout_s=0.2)
    async with connect(socket_url(gateway)) as socket:
        assert (await closed(socket))[0] == 1000


async def test_the_key_is_asked_for_and_looked_up_for_each_message(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[hash_key("sk-one")])
    engines[0].behaviour = answers("one")
    with pytest.raises(InvalidStatus) as refused:
        await connect(socket_url(gateway))
    assert refused.value.response.status_code == 401
    async with connect(socket_url(gateway), additional_headers=KEY) as socket:
        assert (await answer_to(socket))["type"] == "response.completed"
        gateway.gateway.worker.keys._callers.clear()
        last = await answer_to(socket)
        assert last["status"] == 401
        assert (await closed(socket))[0] == 1008


async def test_web_pages_of_other_origins_are_refused(engines, gateways) -> None:
    gateway = await gateways(engines[0], allowed_origins=["https://app.example.com"])
    with pytest.raises(InvalidStatus) as refused:
        await connect(socket_url(gateway), origin="https://evil.example.com")  # type: ignore[arg-type]
    assert refused.value.response.status_code == 403
    async with connect(socket_url(gateway), origin="https://app.example.com"):  # type: ignore[arg-type]
        pass


async def test_other_requests_to_the_path_get_a_426(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    async with gateway.session.get(f"{gateway.url}/v1/responses") as reply:
        assert (reply.status, reply.headers["upgrade"]) == (426, "websocket")
        assert (await reply.json())["error"]["code"] == "upgrade_required"
    headers = {"Connection": "Upgrade", "Upgrade": "WebSocket", "Sec-WebSocket-Version": "13"}
    async with gateway.session.get(f"{gateway.url}/v1/responses", headers=headers) as reply:
        assert (await reply.json())["error"]["param"] == "sec-websocket-key"
    assert isinstance(gateway.session, aiohttp.ClientSession)


@pytest.mark.layouts
async def test_a_gateway_that_drains_finishes_the_response_and_closes(engines, gateways, fake) -> None:
    gateway, gate = await gateways(engines[0]), asyncio.Event()
    engines[0].behaviour = answers("one", gate)
    async with connect(socket_url(gateway)) as socket:
        await create(socket)
        await fake.until(lambda: len(engines[0].requests) == 1)
        gateway.gateway.worker.draining = True
        gate.set()
        assert (await received(socket))[-1]["type"] == "response.completed"
        assert (await closed(socket))[0] == 1001


async def test_the_client_of_openai_connects(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = answers("one")
    client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    async with client, client.responses.connect() as opened:
        await opened.response.create(model="tiny", input="a", store=False)
        kinds = []
        async for event in opened:
            kinds.append(event.type)
            if event.type == "response.completed":
                break
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


async def test_a_client_that_reads_nothing_loses_its_connection(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], slow_client_timeout_s=0.3)
    engines[0].behaviour = answers("x" * 8_000_000)
    async with connect(socket_url(gateway), max_size=None, max_queue=1) as socket:
        await create(socket)
        await fake.until(lambda: gateway.gateway.worker.in_flight_limit.num_in_flight == 1)
        socket.transport.pause_reading()
        await fake.until(lambda: gateway.gateway.worker.in_flight_limit.num_in_flight == 0)
        socket.transport.resume_reading()
        assert (await closed(socket))[0] in (0, 1006)


async def test_an_idle_connection_makes_room_for_another(engines, gateways) -> None:
    gateway = await gateways(engines[0], max_connections=4)
    engines[0].behaviour = answers("one")
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(connect(socket_url(gateway))) for _ in range(4)]
        assert (await answer_to(opened[-1]))["type"] == "response.completed"
        assert (await closed(opened[0]))[0] in (0, 1006), "the one that has been idle for longest"


@given(st.lists(st.sampled_from(["{}", '{"a": 1}', '{"a": "é😀"}', None]), max_size=6), st.lists(st.integers(1, 9)))
def test_events_in_any_parts_are_the_same_messages(events: list[str | None], sizes: list[int]) -> None:
    raw = "".join(": waiting\n\n" if each is None else f"event: e\ndata: {each}\n\n" for each in events).encode()
    reader, found, at = EventMessages(), [], 0
    for size in [*sizes, len(raw) + 1]:
        for part in reader.push(raw[at : at + size]):
            if part is None:
                found.append(None)
            elif part.is_first:
                found.append(part.data)
            else:
                assert isinstance(found[-1], bytes)
                found[-1] += part.data
        at += size
    assert found == [None if each is None else each.encode() for each in events]
    assert not reader.is_within

"""Slots and bytes of a gateway: whatever a tenant leaves unfinished, others are served, and refusals say why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.config import BatchesConfig
from pagemill_servers.auth import hash_key

GREEDY, QUIET = "sk-greedy", "sk-quiet"
BEARER = {"Authorization": f"Bearer {QUIET}"}


def keys(limits: str = "") -> list[str]:
    return [f"{hash_key(GREEDY)} tenant=greedy {limits}".strip(), f"{hash_key(QUIET)} tenant=quiet"]


class Unfinished:
    """A request whose body has arrived in part."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Send nothing more of the body but its end, and return the answer."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            status = int((await self.reader.readline()).split()[1])
            headers: dict[str, str] = {}
            while (line := await self.reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))


@asynccontextmanager
async def unfinished(
    url: str, count: int, *, path: str = "/v1/chat/completions", sent: int = 0, declared: int = 1000, kind: str = ""
) -> AsyncIterator[list[Unfinished]]:
    """Begin requests of the greedy tenant with bodies of `declared` bytes, of which `sent` are sent."""
    address = urlsplit(url)
    found: list[Unfinished] = []
    try:
        for _ in range(count):
            each = Unfinished(*await asyncio.open_connection(address.hostname, address.port))
            found.append(each)
            each.writer.write(
                f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {GREEDY}\r\n"
                f"Content-Type: {kind or 'application/json'}\r\nContent-Length: {declared}\r\n\r\n".encode()
                + b" " * sent
            )
        yield found
    finally:
        for each in found:
            each.writer.close()


def inside(gateway) -> int:
    return gateway.gateway.worker.in_flight_limit.num_in_flight


async def test_unfinished_bodies_of_a_tenant_leave_slots_to_others(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=keys(), max_requests=40)
    async with unfinished(gateway.url, 60) as requests:
        await eventually(lambda: inside(gateway) == 36)
        assert (await gateway.chat(headers=BEARER)).status == 200
        assert inside(gateway) == 36
        for each in requests:
            each.writer.write(b" " * 1000)  # the body ends, and is no JSON
        replies = [await each.reply() for each in requests]
    refused = [reply for reply in replies if reply[0] == 429]
    assert len(refused) == 24
    for _, headers, body in refused:
        error = json.loads(body)["error"]
        assert error["code"] == "tenant_share_exceeded"
        assert headers["retry-after"] == "1"
    assert {status for status, _, _ in replies} == {400, 429}
    await eventually(lambda: inside(gateway) == 0)


async def test_a_key_has_no_more_unfinished_bodies_than_requests_in_a_minute(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=keys("requests_per_minute=5"))
    async with unfinished(gateway.url, 20) as requests:
        await eventually(lambda: inside(gateway) == 5)
        for each in requests:
            each.writer.write(b" " * 1000)
        replies = [await each.reply() for each in requests]
        refused = [reply for reply in replies if reply[0] == 429]
        assert len(refused) == 15
        assert json.loads(refused[0][2])["error"]["code"] == "rate_limit_exceeded"
        assert refused[0][1]["x-ratelimit-limit-requests"] == "5"
        assert "retry-after" in refused[0][1]
        assert (await gateway.chat(headers=BEARER)).status == 200
    assert (await gateway.chat(headers={"Authorization": f"Bearer {GREEDY}"})).status == 200, "nothing is left counted"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/tokenize", ""), ("/v1/messages", ""), ("/v1/batches", ""), ("/v1/files", "multipart/form-data; boundary=b")],
)
async def test_every_route_with_a_body_has_shares(engines, gateways, tmp_path, path: str, kind: str) -> None:
    batches = BatchesConfig(directory=str(tmp_path))
    gateway = await gateways(engines[0], api_keys=keys(), max_requests=10, batches=batches)
    async with unfinished(gateway.url, 15, path=path, kind=kind) as requests:
        await eventually(lambda: inside(gateway) == 9)
        assert (await gateway.chat(headers=BEARER)).status == 200
        for each in requests:
            each.writer.write(b" " * 1000)
        statuses = [(await each.reply())[0] for each in requests]
    assert statuses.count(429) == 6
    assert statuses.count(400) == 9


async def test_an_early_refusal_has_the_form_of_its_dialect(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=keys(), max_requests=10)
    async with unfinished(gateway.url, 10, path="/v1/messages") as requests:
        await eventually(lambda: inside(gateway) == 9)
        for each in requests:
            each.writer.write(b" " * 1000)
        (refused,) = [body for status, _, body in [await each.reply() for each in requests] if status == 429]
    assert json.loads(refused)["type"] == "error"
    assert json.loads(refused)["error"]["type"] == "rate_limit_error"


async def test_slow_uploads_of_a_tenant_leave_bytes_to_others(engines, gateways) -> None:
    megabyte = 2**20
    gateway = await gateways(
        engines[0], api_keys=keys(), max_body_bytes=megabyte, max_in_flight_body_bytes=8 * megabyte
    )
    limit = gateway.gateway.worker.in_flight_limit
    async with unfinished(gateway.url, 20, sent=megabyte - 10_000, declared=megabyte) as requests:
        await eventually(lambda: limit.num_bytes > 6 * megabyte)
        text = "x" * 300_000
        for _ in range(3):
            assert (await gateway.chat(headers=BEARER, messages=[{"role": "user", "content": text}])).status == 400
        assert limit.num_bytes <= 0.9 * 8 * megabyte
        for each in requests:
            each.writer.write(b" " * 10_000)
        statuses = [(await each.reply())[0] for each in requests]
    assert set(statuses) == {400, 429}
    await eventually(lambda: limit.num_bytes == 0)


async def test_bodies_that_wait_for_an_engine_are_counted_as_what_they_became(engines, gateways) -> None:
    """A body of many small values takes many times its size once it is parsed, and is held until an engine reports."""
    engines[0].hold_state()
    gateway = await gateways(engines[0], wait=False, outage_wait_s=30.0, api_keys=keys())
    limit = gateway.gateway.worker.in_flight_limit
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"examples": [[] for _ in range(30_000)]}}}]
    async with waiting(gateway, tools=tools):
        await eventually(lambda: limit.num_bytes > 30_000 * 64)
    async with waiting(gateway, tools=[]):
        await eventually(lambda: inside(gateway) == 1)
        assert limit.num_bytes < 10_000


@asynccontextmanager
async def waiting(gateway, **fields: object) -> AsyncIterator[None]:
    """Send a request of the greedy tenant, and leave at the end of the block."""
    asking = asyncio.create_task(gateway.chat(headers={"Authorization": f"Bearer {GREEDY}"}, **fields))
    try:
        yield
    finally:
        asking.cancel()
        await eventually(lambda: inside(gateway) == 0)
        assert gateway.gateway.worker.in_flight_limit.num_bytes == 0

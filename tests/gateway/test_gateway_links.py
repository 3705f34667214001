"""Requests get the link to an engine in the order of their calls, while it is being opened and afterwards."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagemill_gateway.engine_http.connecting import CannotConnect, Origin, origin_of
from pagemill_gateway.engine_http.engine_connection import ConnectionBroken
from pagemill_gateway.relay.engine_link import LinkTimeouts
from pagemill_gateway.relay.links import Links
from pagemill_routing.attempts.attempt_failures import UpstreamFailure

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
NUM_REQUESTS = 40


@asynccontextmanager
async def engine(answer: bytes, *, hangs_up: bool = False) -> AsyncIterator[tuple[Origin, list[bytes]]]:
    """Yield the engine's origin and its requests: one on each connection, answered with `answer`."""
    heads: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if hangs_up:
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield origin_of("http://{}:{}".format(*server.sockets[0].getsockname())), heads
        for writer in writers:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    opened = Links(60.0, ssl.create_default_context(), LinkTimeouts(60.0, 60.0))
    yield opened
    await opened.close()


async def ask_in_turn(links: Links, origin: Origin) -> tuple[list[int], list[Any]]:
    """Make one request in every turn of the event loop; return the order in which they proceed, and their results."""
    order: list[int] = []

    async def ask(number: int) -> Any:
        try:
            return links.ready(origin, "token") or await links.open(origin, "token")
        finally:
            order.append(number)

    tasks = []
    while len(tasks) < NUM_REQUESTS or not tasks[-1].done():
        tasks.append(asyncio.create_task(ask(len(tasks))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return order, await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_that_wait_for_a_link_proceed_before_later_ones(links) -> None:
    async with engine(SWITCHED) as (origin, heads):
        order, got = await ask_in_turn(links, origin)
    assert order == list(range(len(got)))
    assert (len(heads), len(set(map(id, got)))) == (1, 1)
    assert got[0] is not None


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        *((each, "x", "broken") for each in (400, 401, 403, 404, 413, 422, 426, 500)),
        *((each, "x", "refused") for each in (409, 429, 503)),
        (503, "draining", "declined"),
        (503, "not_ready", "declined"),
    ],
)
async def test_all_waiting_requests_fail_as_the_refusal_of_the_link_says(links, status, code, kind) -> None:
    body = b'{"error": {"message": "not this one", "code": "%s"}}' % code.encode()
    head = b"HTTP/1.1 %d Refused\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    async with engine(head + body) as (origin, heads):
        failed = await asyncio.gather(*(links.open(origin, "token") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in failed] == [UpstreamFailure] * 3, "a client is never at fault"
    assert {each.kind for each in failed} == {kind}
    assert {each.retry_after_s for each in failed} == {7.0 if kind != "broken" else None}
    assert all("not this one" in each.message and (kind != "broken" or str(status) in each.message) for each in failed)
    assert (len(heads), links.num_open) == (1, 0)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 401 No\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 401 No\r\n\r\n" + b"x" * 99_999]
)
async def test_a_refusal_whose_body_is_missing_or_too_long_has_its_status(links, answer) -> None:
    async with engine(answer, hangs_up=True) as (origin, _):
        with pytest.raises(UpstreamFailure, match="The engine answered 401") as failed:
            await links.open(origin, "token")
    assert failed.value.kind == "broken"


async def test_a_server_that_speaks_no_http_is_no_engine(links) -> None:
    async with engine(b"SSH-2.0-OpenSSH_9.2\r\n") as (origin, _):
        with pytest.raises(ConnectionBroken):
            await links.open(origin, "token")


async def test_all_waiting_requests_fail_if_no_engine_listens(links) -> None:
    async with engine(SWITCHED) as (origin, _):
        pass
    failed = await asyncio.gather(*(links.open(origin, "token") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in failed] == [CannotConnect] * 3


async def test_a_request_that_is_cancelled_leaves_the_link_to_the_others(links) -> None:
    async with engine(SWITCHED) as (origin, heads):
        first, second = (asyncio.create_task(links.open(origin, "token")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second is not None
        assert (first.cancelled(), len(heads), links.num_open) == (True, 1, 1)

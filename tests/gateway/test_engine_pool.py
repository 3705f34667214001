"""Connections to engines over real sockets: reuse, closing, and engines that cannot be reached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvloop
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.engine_http.connecting import CannotConnect, Origin, origin_of
from pagemill_gateway.engine_http.engine_connection import ConnectionBroken, EngineConnection
from pagemill_gateway.engine_http.engine_pool import EnginePool
from pagemill_servers.tls.certificates import EngineTrust

IDLE_S = 0.2
HEAD = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"


class Engine:
    """Answers every request with `answer`; counts connections, and those that the gateway ended."""

    def __init__(self) -> None:
        self.answer = ANSWER
        self.num_connections = 0
        self.num_gone = asyncio.Semaphore(0)
        self.port = 0
        self.hangs_up = False
        self.num_body_bytes = 0
        self.body = b""
        self.serving: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.serving.add(asyncio.current_task())
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.body = await reader.readexactly(self.num_body_bytes)
                writer.write(self.answer)
                await writer.drain()
                if self.hangs_up:
                    break
        self.num_gone.release()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def run(scenario: Callable[[EnginePool, Engine, Origin], Awaitable[None]], host: str = "127.0.0.1") -> None:
    """Run the test on both kinds of event loop, because their transports behave differently."""

    async def main() -> None:
        engine = Engine()
        server = await asyncio.start_server(engine.serve, host.strip("[]"), 0)
        engine.port = server.sockets[0].getsockname()[1]
        pool = EnginePool(connect_timeout_s=0.5, idle_s=IDLE_S, trust=EngineTrust())
        async with asyncio.timeout(WAIT_LIMIT_S):
            await scenario(pool, engine, origin_of(f"http://{host}:{engine.port}"))
            await pool.close()
            assert pool.num_open == 0
            await asyncio.gather(*filter(None, engine.serving))
        server.close()
        await server.wait_closed()

    asyncio.run(main())
    uvloop.run(main())


async def ask(pool: EnginePool, origin: Origin) -> EngineConnection:
    connection = await pool.take(origin)
    await connection.ask(HEAD, b"")
    return connection


async def ask_and_read(pool: EnginePool, origin: Origin) -> None:
    connection = await ask(pool, origin)
    body = b""
    while data := await connection.receive():
        body += data
    assert body == b"ok"
    pool.release(origin, connection)


def test_one_connection_serves_consecutive_requests() -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        for _ in range(5):
            await ask_and_read(pool, origin)
        assert engine.num_connections == pool.num_idle == pool.num_open == 1
        await asyncio.gather(*(ask_and_read(pool, origin) for _ in range(3)))
        assert engine.num_connections == pool.num_idle == 3

    run(scenario)


def test_unused_connections_are_closed() -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        await ask_and_read(pool, origin)
        await engine.num_gone.acquire()
        await eventually(lambda: pool.num_open == pool.num_idle == 0)
        await ask_and_read(pool, origin)
        assert engine.num_connections == 2

    run(scenario)


def test_a_connection_that_the_engine_closed_is_not_used() -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        engine.hangs_up = True
        await ask_and_read(pool, origin)
        await eventually(lambda: pool.num_open == 0)
        await ask_and_read(pool, origin)
        assert engine.num_connections == 2

    run(scenario)


def test_leaving_an_answer_before_its_end_closes_the_connection_at_once() -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        engine.answer = ENDLESS
        connection = await ask(pool, origin)
        assert await connection.receive() == b"a"
        pool.release(origin, connection)
        await engine.num_gone.acquire()
        assert pool.num_idle == 0

    run(scenario)


def test_a_reader_that_pauses_stops_the_engine_and_loses_no_bytes() -> None:
    num_bytes = 30_000_000

    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        engine.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % num_bytes + b"z" * num_bytes
        connection = await ask(pool, origin)
        received, most = 0, 0
        while data := await connection.receive():
            received += len(data)
            most = max(most, len(data))
            await asyncio.sleep(0.001)  # many bytes may arrive meanwhile, but are not read
        assert received == num_bytes
        assert most < 1_000_000
        pool.release(origin, connection)
        assert pool.num_idle == 1

    run(scenario)


def test_a_large_request_arrives_whole() -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        body = bytes(range(256)) * 40_000
        engine.num_body_bytes = len(body)
        connection = await pool.take(origin)
        await connection.ask(HEAD, body)
        assert engine.body == body
        assert await connection.receive() == b"ok"
        pool.release(origin, connection)
        assert pool.num_idle == 1

    run(scenario)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_an_engine_that_closes_without_an_answer_is_reported_and_not_retried(answer: bytes) -> None:
    """The pool cannot know whether the engine has processed the request."""

    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        await ask_and_read(pool, origin)
        engine.answer, engine.hangs_up = answer, True
        with pytest.raises(ConnectionBroken):
            await ask(pool, origin)
        assert engine.num_connections == 1

    run(scenario)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_port_without_a_listener_refuses(host: str) -> None:
    """The result does not depend on the number of addresses that the name has."""

    async def scenario(pool: EnginePool, _: Engine, __: Origin) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(CannotConnect) as caught:
                await pool.take(origin_of(f"http://{host}:{bound.getsockname()[1]}"))
        assert caught.value.refused

    run(scenario)


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_names_and_ipv6_addresses_are_resolved(host: str) -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        await ask_and_read(pool, origin)
        assert engine.num_connections == 1

    run(scenario, host)


def test_unknown_hosts_and_hosts_that_do_not_answer_cannot_be_reached() -> None:
    async def scenario(pool: EnginePool, engine: Engine, origin: Origin) -> None:
        silent = origin._replace(is_tls=True)  # the engine waits for a plain-text request and sends nothing
        for each in (origin._replace(host="unknown.invalid"), silent):
            with pytest.raises(CannotConnect) as caught:
                await pool.take(each)
            assert not caught.value.refused

    run(scenario)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://10.0.0.1:8000", Origin("10.0.0.1", 8000, False, "10.0.0.1:8000")),
        ("http://engine", Origin("engine", 80, False, "engine")),
        ("https://Engine.example/", Origin("engine.example", 443, True, "engine.example")),
        ("http://[fd00::1]:8000", Origin("fd00::1", 8000, False, "[fd00::1]:8000")),
        ("http://bücher.example:1", Origin("xn--bcher-kva.example", 1, False, "xn--bcher-kva.example:1")),
    ],
)
def test_an_engines_address_is_parsed(url: str, origin: Origin) -> None:
    assert origin_of(url) == origin


@pytest.mark.parametrize("url", ["", "10.0.0.1:8000", "ftp://engine", "http://:80", "http://engine:x", "http://[::1"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        origin_of(url)

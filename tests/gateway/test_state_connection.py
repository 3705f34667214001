"""The connection of a state stream: frames that are applied at once, frames for the task, and its end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_gateway.discovery.state_connection import StateConnection
from pagemill_gateway.discovery.state_sockets import StateConnector, StateSockets
from pagemill_gateway.engine_http.connecting import Connector, origin_of
from pagemill_gateway.engine_http.engine_connection import MAX_UNREAD_BYTES, ConnectionBroken
from pagemill_protocol.frames import FrameError, encode_state
from pagemill_protocol.report.state import StateFrame

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUEST = b"GET /internal/state HTTP/1.1\r\nHost: engine\r\n\r\n"


def frame(number: int) -> bytes:
    return encode_state(StateFrame(sequence=number))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """One accepted connection, which the test controls."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def begin(self) -> None:
        await self._reader.readuntil(b"\r\n\r\n")
        self.writer.write(HEAD)

    def send(self, data: bytes) -> None:
        self.writer.write(chunk(data))


class Applied:
    """Applies all frames except the named ones."""

    def __init__(self, *left: int) -> None:
        self.left = left
        self.numbers: list[int] = []
        self.seen = asyncio.Event()

    def __call__(self, each: StateFrame) -> bool:
        if each.sequence in self.left:
            return False
        self.numbers.append(each.sequence)
        self.seen.set()
        return True

    async def until(self, *numbers: int) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while self.numbers != list(numbers):
                self.seen.clear()
                await self.seen.wait()


Connect = Callable[[Callable[[StateFrame], bool]], AbstractAsyncContextManager[tuple[StateConnection, Engine]]]


@pytest.fixture(params=["read with others", "read by the event loop"])
async def connected(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Return a function that opens a state stream; the event loop reads streams with TLS."""
    sockets, trust = StateSockets(), ssl.create_default_context()
    is_shared = request.param == "read with others"
    connector = StateConnector(WAIT_LIMIT_S, trust, sockets) if is_shared else Connector(WAIT_LIMIT_S, trust)
    yield partial(_connected, connector)
    sockets.close()


@asynccontextmanager
async def _connected(
    connector: Connector, apply: Callable[[StateFrame], bool]
) -> AsyncIterator[tuple[StateConnection, Engine]]:
    accepted: asyncio.Queue[Engine] = asyncio.Queue()
    server = await asyncio.start_server(lambda *streams: accepted.put_nowait(Engine(*streams)), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = await connector.connect(origin_of(f"http://127.0.0.1:{port}"), lambda: StateConnection(apply))
    engine = await accepted.get()
    try:
        _, _ = await asyncio.gather(connection.ask(REQUEST), engine.begin())
        yield connection, engine
    finally:
        connection.abort()
        engine.writer.close()
        server.close()
        await server.wait_closed()


async def test_frames_are_applied_on_arrival_without_waking_the_task(connected: Connect) -> None:
    applied = Applied()
    async with connected(applied) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        for number in range(5):
            engine.send(frame(number))
        await applied.until(0, 1, 2, 3, 4)
        assert not task.done()
        engine.writer.write(b"0\r\n\r\n")
        assert await task is None


async def test_frames_behind_one_for_the_task_wait_for_it(connected: Connect) -> None:
    applied = Applied(2)
    async with connected(applied) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        engine.send(b"".join(map(frame, range(5))))
        found = await task
        assert found is not None
        assert (found.sequence, applied.numbers) == (2, [0, 1])
        left = [await connection.left_frame(WAIT_LIMIT_S) for _ in range(2)]
        assert [each.sequence for each in left if each is not None] == [3, 4]
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        engine.send(frame(5))
        await applied.until(0, 1, 5)
        task.cancel()


@pytest.mark.parametrize("cut", [1, 3, 4, 5])
async def test_a_frame_may_arrive_in_parts(connected: Connect, cut: int) -> None:
    applied = Applied()
    async with connected(applied) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        data = frame(7) + frame(8)
        engine.send(data[:cut])
        engine.send(data[cut:])
        await applied.until(7, 8)
        task.cancel()


async def test_a_busy_task_stops_the_reading(connected: Connect) -> None:
    async with connected(Applied()) as (connection, engine):
        several = frame(1) * 64
        num_chunks = 64 * MAX_UNREAD_BYTES // len(several)
        for _ in range(num_chunks):
            engine.send(several)  # no task waits
        async with asyncio.timeout(WAIT_LIMIT_S):
            while connection._reads:  # noqa: ASYNC110 (nothing says so)
                await asyncio.sleep(0)
        assert await connection.left_frame(WAIT_LIMIT_S) is not None
        assert len(connection._left) < num_chunks * 64 // 4, "most of the data must wait in the engine"


async def test_silence_beyond_the_limit_raises(connected: Connect) -> None:
    async with connected(Applied()) as (connection, _):
        with pytest.raises(TimeoutError, match=r"no state frame within 0\.05 s"):
            await connection.left_frame(0.05)


async def test_garbage_ends_the_stream(connected: Connect) -> None:
    applied = Applied()
    async with connected(applied) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        engine.send(frame(0) + b"\xff" * 100)
        with pytest.raises(FrameError):
            await task


async def test_an_error_during_applying_ends_the_stream(connected: Connect) -> None:
    def fail(_: StateFrame) -> bool:
        raise LookupError("a gap")

    async with connected(fail) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        engine.send(frame(0))
        with pytest.raises(LookupError, match="a gap"):
            await task


async def test_no_frame_behind_one_that_ends_the_stream_is_applied(connected: Connect) -> None:
    """One read returns several chunks."""
    tried: list[int] = []

    def fail(each: StateFrame) -> bool:
        tried.append(each.sequence)
        raise LookupError("a gap")

    async with connected(fail) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        engine.writer.write(chunk(frame(3)) + chunk(frame(4)) + chunk(frame(5)))
        with pytest.raises(LookupError, match="a gap"):
            await task
    assert tried == [3]


async def test_an_engine_that_disconnects_inside_a_frame_breaks_the_stream(connected: Connect) -> None:
    async with connected(Applied()) as (connection, engine):
        task = asyncio.create_task(connection.left_frame(WAIT_LIMIT_S))
        await asyncio.sleep(0)
        engine.send(frame(0)[:3])
        engine.writer.close()
        with pytest.raises(ConnectionBroken):
            await task

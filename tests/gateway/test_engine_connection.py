"""A connection to an engine: answers in any pieces, unread rests, and whether the connection can be used again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT_LIMIT_S

from pagemill_gateway.engine_http.engine_connection import (
    MAX_HEAD_BYTES,
    MAX_UNREAD_BYTES,
    ConnectionBroken,
    EngineConnection,
)

REQUEST = b"GET / HTTP/1.1\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


class Wire(asyncio.Transport):
    """A transport in memory that records the writes and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.aborted = False
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


class Asked(NamedTuple):
    connection: EngineConnection
    wire: Wire
    answer: asyncio.Task[None]
    """Done when the headers have arrived."""

    async def body(self) -> bytes:
        body = b""
        while data := await self.connection.receive():
            body += data
        return body


def run(scenario: Callable[[Asked], Awaitable[None]]) -> None:
    async def main() -> None:
        connection = EngineConnection()
        connection.connection_made(wire := Wire())
        answer = asyncio.create_task(connection.ask(REQUEST))
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_LIMIT_S):
            await scenario(Asked(connection, wire, answer))

    asyncio.run(main())


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces)
    return b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


BODIES = st.lists(st.binary(min_size=1, max_size=300), max_size=5)
INTERIM = st.sampled_from(
    [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nx-a: interim\r\n\r\n" * 2]
)
FRAMINGS = st.sampled_from(["chunked", "trailer", "length", "hangup", "1.0"])
CUTS = st.lists(st.integers(1, 200), min_size=1, max_size=30)


@given(BODIES, INTERIM, FRAMINGS, CUTS)
def test_an_answer_does_not_depend_on_its_pieces(
    pieces: list[bytes], interim: bytes, framing: str, cuts: list[int]
) -> None:
    body = b"".join(pieces)
    head = OK + b"X-A: one\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = (
        interim
        + {
            "chunked": head + chunked(pieces),
            "trailer": head + chunked(pieces, b"x-b: two\r\n"),
            "length": head + length,
            "hangup": head + b"\r\n" + body,
            "1.0": head.replace(b"1.1", b"1.0") + length,
        }[framing]
    )

    async def scenario(asked: Asked) -> None:
        got: list[bytes] = []
        reading = asyncio.create_task(_read(asked, got))
        rest = answer
        for number in range(len(answer)):
            if not rest:
                break
            size = cuts[number % len(cuts)]
            asked.connection.data_received(rest[:size])
            rest = rest[size:]
            await asyncio.sleep(0)
        if framing == "hangup":
            asked.connection.connection_lost(None)
        await reading
        assert b"".join(got) == body
        assert asked.connection.status == 200
        assert asked.connection.header(b"x-a") == "one"
        assert asked.connection.header(b"x-b") == ""
        assert asked.connection.has_ended

    run(scenario)


async def _read(asked: Asked, got: list[bytes]) -> None:
    await asked.answer
    while data := await asked.connection.receive():
        got.append(data)


@given(BODIES.filter(bool), CUTS, st.floats(0, 0.999))
def test_a_truncated_answer_gives_its_bytes_and_then_an_error(
    pieces: list[bytes], cuts: list[int], share: float
) -> None:
    answer = OK + chunked(pieces)
    body = b"".join(pieces)

    async def scenario(asked: Asked) -> None:
        rest = answer[: int(share * len(answer))]
        for size in cuts * len(rest):
            if not rest:
                break
            asked.connection.data_received(rest[:size])
            rest = rest[size:]
        asked.connection.connection_lost(ConnectionResetError())
        got: list[bytes] = []
        with pytest.raises(ConnectionBroken):
            await _read(asked, got)
        assert body.startswith(b"".join(got))
        assert not asked.connection.has_ended

    run(scenario)


@pytest.mark.parametrize("surplus", [OK + b"Content-Length: 0\r\n\r\n", b"H", b"garbage", b"\0"])
@pytest.mark.parametrize("together", [True, False])
def test_bytes_after_an_answer_end_the_connection_but_not_the_answer(surplus: bytes, together: bool) -> None:
    async def scenario(asked: Asked) -> None:
        answer = OK + chunked([b"abc"])
        for data in [answer + surplus] if together else [answer, surplus]:
            asked.connection.data_received(data)
        await asked.answer
        assert await asked.body() == b"abc"
        assert asked.connection.status == 200
        assert asked.wire.aborted

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Content-Length: x\r\n\r\n",
    ],
)
def test_bytes_that_are_no_answer_are_an_error_at_once(answer: bytes) -> None:
    async def scenario(asked: Asked) -> None:
        asked.connection.data_received(answer)
        with pytest.raises(ConnectionBroken):
            await asked.answer
        assert asked.wire.aborted

    run(scenario)


@pytest.mark.parametrize(
    "before", [b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_HEAD_BYTES, OK + b"x: y\r\n" * MAX_HEAD_BYTES]
)
@pytest.mark.parametrize("size", [10**9, 1000, 7])
def test_headers_that_are_too_large_are_an_error(before: bytes, size: int) -> None:
    async def scenario(asked: Asked) -> None:
        num_taken = 0
        for start in range(0, len(before), size):
            if asked.wire.aborted:
                break
            asked.connection.data_received(before[start : start + size])
            num_taken = start + size
        with pytest.raises(ConnectionBroken):
            await asked.answer
        assert asked.wire.aborted
        assert num_taken <= MAX_HEAD_BYTES + size

    run(scenario)


def test_an_endless_trailer_is_an_error() -> None:
    async def scenario(asked: Asked) -> None:
        asked.connection.data_received(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ")
        for _ in range(MAX_HEAD_BYTES // 1000 + 1):
            asked.connection.data_received(b"y" * 1000)
        assert asked.wire.aborted
        with pytest.raises(ConnectionBroken):
            await asked.body()

    run(scenario)


def test_a_long_stream_with_framing_in_separate_pieces_exceeds_no_header_limit() -> None:
    async def scenario(asked: Asked) -> None:
        asked.connection.data_received(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_HEAD_BYTES):
            for data in (b"1\r\n", b"a", b"\r\n"):
                asked.connection.data_received(data)
            assert await asked.connection.receive() == b"a"
        asked.connection.data_received(b"0\r\n\r\n")
        assert await asked.connection.receive() == b""
        assert asked.connection.has_ended

    run(scenario)


def test_a_slow_reader_pauses_reading_until_it_has_caught_up() -> None:
    async def scenario(asked: Asked) -> None:
        asked.connection.data_received(OK + b"Content-Length: 1000000\r\n\r\n")
        reads: list[bool] = []
        for data in (b"a" * MAX_UNREAD_BYTES, b"b"):
            asked.connection.data_received(data)
            reads.append(asked.wire.reads)
        assert len(await asked.connection.receive()) == MAX_UNREAD_BYTES + 1
        assert [*reads, asked.wire.reads] == [True, False, True]

    run(scenario)


def test_a_read_that_times_out_loses_no_bytes() -> None:
    """A reader that times out at the moment when bytes arrive gets them with its next read."""

    async def scenario(asked: Asked) -> None:
        asked.connection.data_received(OK + chunked([])[:-5])
        for number in range(3):
            waiting = asyncio.create_task(asked.connection.receive())
            await asyncio.sleep(0)
            asked.connection.data_received(b"1\r\n%d\r\n" % number)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await asked.connection.receive() == b"%d" % number

    run(scenario)


@given(CUTS, st.binary(max_size=100))
def test_a_connection_that_switches_protocols_is_handed_over_with_what_follows(cuts: list[int], first: bytes) -> None:
    answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n" + first

    async def scenario(asked: Asked) -> None:
        rest = answer
        for size in cuts * len(answer):
            asked.connection.data_received(rest[:size])
            rest = rest[size:]
            if not rest:
                break
        await asked.answer
        assert (asked.connection.status, asked.wire.aborted) == (101, False)
        asked.connection.hand_over(successor := Successor())
        assert (successor.transport, asked.wire.protocol) == (asked.wire, successor)
        assert successor.received == first

    run(scenario)


def test_a_connection_that_was_lost_meanwhile_is_not_handed_over() -> None:
    async def scenario(asked: Asked) -> None:
        asked.connection.data_received(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
        asked.connection.connection_lost(None)
        await asked.answer
        with pytest.raises(ConnectionBroken):
            asked.connection.hand_over(Successor())

    run(scenario)


class Successor(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

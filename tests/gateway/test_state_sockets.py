"""Sockets that are read together: when and in which turn of the event loop, and without effects on each other."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.discovery import state_sockets
from pagemill_gateway.discovery.state_sockets import SocketTransport, StateSockets

LONG_S = 1.0
"""An interval that is long compared with everything else in the test."""


class Reader(asyncio.Protocol):
    def __init__(self, sockets: StateSockets) -> None:
        self._sockets = sockets
        self.data = b""
        self.read_at: list[float] = []
        """The times at which all sockets were read, one for each piece."""
        self.lost: list[Exception | None] = []
        self.fails = False

    def data_received(self, data: bytes) -> None:
        if self.fails:
            raise LookupError("a fault")
        self.data += data
        self.read_at.append(self._sockets.read_at)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)


class End:
    """The engine's and the gateway's end of a connection."""

    def __init__(self, sockets: StateSockets) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            self.sock, _ = server.accept()
        near.setblocking(False)
        self.reader = Reader(sockets)
        self.transport: SocketTransport = sockets.attach(near, self.reader)

    async def until(self, data: bytes) -> None:
        await eventually(lambda: self.reader.data == data)


@pytest.fixture
async def sockets() -> AsyncIterator[StateSockets]:
    made = StateSockets()
    yield made
    made.close()


@pytest.fixture
async def ends(sockets: StateSockets) -> AsyncIterator[list[End]]:
    made = [End(sockets) for _ in range(4)]
    yield made
    for end in made:
        end.sock.close()


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_sockets, "INTERVAL_S", LONG_S)
    monkeypatch.setattr(state_sockets, "SPARSE_S", LONG_S)


@pytest.mark.usefixtures("long")
async def test_bytes_that_arrive_within_an_interval_are_read_in_one_turn(ends: list[End]) -> None:
    ends[0].sock.send(b"first")
    await ends[0].until(b"first")
    for end in ends[1:]:
        end.sock.send(b"x")
    for end in ends[1:]:
        await end.until(b"x")
    (first_at,) = ends[0].reader.read_at
    ((second_at,),) = {tuple(end.reader.read_at) for end in ends[1:]}
    assert second_at - first_at >= LONG_S


async def test_the_first_bytes_after_a_pause_are_read_at_once_and_silence_has_no_timer(
    sockets: StateSockets, ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        for end in ends:
            end.sock.send(b"x")
        for end in ends:
            await end.until(b"x" * (number + 1))
    await eventually(lambda: not sockets.has_timer)
    monkeypatch.setattr(state_sockets, "INTERVAL_S", 2 * WAIT_LIMIT_S)
    sockets.read_at -= 4 * WAIT_LIMIT_S
    ends[0].sock.send(b"y")
    await ends[0].until(b"xxxy")


async def test_a_large_message_arrives_whole(ends: list[End]) -> None:
    data = bytes(range(256)) * 40_000
    writing = asyncio.to_thread(ends[0].sock.sendall, data)
    await writing
    await ends[0].until(data)


async def test_a_socket_that_is_not_read_keeps_its_bytes(ends: list[End]) -> None:
    ends[0].transport.pause_reading()
    ends[0].sock.send(b"later")
    ends[1].sock.send(b"now")
    await ends[1].until(b"now")
    assert not ends[0].reader.data
    ends[0].transport.resume_reading()
    await ends[0].until(b"later")


@pytest.mark.parametrize("is_read", [True, False])
async def test_an_engine_that_dies_ends_only_its_own_connection(ends: list[End], is_read: bool) -> None:
    if not is_read:
        ends[0].transport.pause_reading()
    ends[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # causes a connection reset
    ends[0].sock.close()
    await eventually(lambda: len(ends[0].reader.lost) == 1)
    assert isinstance(ends[0].reader.lost[0], ConnectionResetError)
    assert ends[0].transport.is_closing()
    ends[1].sock.send(b"x")
    await ends[1].until(b"x")


async def test_an_engine_that_disconnects_ends_its_connection_after_the_bytes_that_it_sent(ends: list[End]) -> None:
    ends[0].sock.send(b"x")
    ends[0].sock.close()
    await eventually(lambda: ends[0].reader.lost == [None])
    assert ends[0].reader.data == b"x"


async def test_an_error_in_a_reader_ends_only_its_own_connection(ends: list[End]) -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    ends[0].reader.fails = True
    for end in ends:
        end.sock.send(b"x")
    for end in ends[1:]:
        await end.until(b"x")
    await eventually(lambda: ends[0].reader.lost == [None])
    assert [type(fault) for fault in faults] == [LookupError]


async def test_bytes_that_the_socket_does_not_accept_are_sent_later(ends: list[End]) -> None:
    data = bytes(range(256)) * 40_000
    ends[0].transport.write(data)
    ends[0].transport.write(b"end")
    assert ends[0].transport.get_write_buffer_size() > 0

    def read() -> bytes:
        found = bytearray()
        while len(found) < len(data) + 3:
            found += ends[0].sock.recv(1 << 20)
        return bytes(found)

    assert await asyncio.to_thread(read) == data + b"end"
    await eventually(lambda: ends[0].transport.get_write_buffer_size() == 0)

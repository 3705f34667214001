"""TLS handshakes count among a port's connections before they are done, are limited, and lose no bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from certificates import write_certificate
from waiting import WAIT_LIMIT_S, eventually

from pagemill_servers.connection_limits import ConnectionLimits
from pagemill_servers.tls import handshakes
from pagemill_servers.tls.handshakes import secured

Address = tuple[str, int]
Loop = Callable[[], asyncio.AbstractEventLoop]
on_both_loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Echo(asyncio.Protocol):
    """Counts its connection among those of the port and returns what it receives."""

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.place = self.limits.open("127.0.0.1", transport.abort)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.place.release()


@contextlib.asynccontextmanager
async def serving(folder: Path, limits: ConnectionLimits) -> AsyncIterator[tuple[Address, ssl.SSLContext]]:
    """Serve `Echo` over TLS; yield the address and a client's context."""
    files = write_certificate(folder)
    certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.load_cert_chain(*files)
    protocol = secured(type("LimitedEcho", (Echo,), {"limits": limits}), certificate, limits)
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname(), ssl.create_default_context(cafile=files[0])
    finally:
        server.close()


async def echo(address: Address, trust: ssl.SSLContext, data: bytes) -> bytes:
    async with asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection(*address, ssl=trust)
        writer.write(data)
        received = await reader.readexactly(len(data))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return received


def hello() -> bytes:
    """Return the first message of a handshake."""
    sent = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="a").do_handshake()
    return sent.read()


async def opened(address: Address, *pieces: bytes) -> socket.socket:
    """Return a connection on which these bytes were sent."""
    client = socket.create_connection(address)
    client.setblocking(False)
    for piece in pieces:
        await asyncio.get_running_loop().sock_sendall(client, piece)
    return client


async def is_ended(client: socket.socket) -> bool:
    """Read until the server has closed the connection."""
    with contextlib.closing(client), contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(client, 65536):
            pass
    return True


@on_both_loops
def test_bytes_of_a_client_arrive_whole_whatever_their_number(tmp_path: Path, loop: Loop) -> None:
    async def check() -> None:
        limits = ConnectionLimits(10)
        async with serving(tmp_path, limits) as (address, trust):
            for num_bytes in (1, 1000, 100_000):
                data = bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256)
                assert await echo(address, trust, data) == data
            await eventually(lambda: limits.num_open == 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


@on_both_loops
def test_a_handshake_may_arrive_in_pieces(tmp_path: Path, loop: Loop) -> None:
    async def check() -> None:
        async with serving(tmp_path, ConnectionLimits(10)) as (address, trust):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = trust.wrap_bio(incoming, outgoing, server_hostname="gateway.test")
            client, running = await opened(address), asyncio.get_running_loop()

            async def run(step: Callable[[], object]) -> object:
                while True:
                    try:
                        done = step()
                    except ssl.SSLWantReadError:
                        done = None
                    for byte in outgoing.read():
                        await running.sock_sendall(client, bytes([byte]))
                        await asyncio.sleep(0)
                    if done is not None:
                        return done
                    incoming.write(await running.sock_recv(client, 65536))

            def shake() -> bool:
                tls.do_handshake()
                return True

            async with asyncio.timeout(WAIT_LIMIT_S):
                await run(shake)
                await run(lambda: tls.write(b"hi"))
                assert await run(lambda: tls.read(2)) == b"hi"
            client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


@on_both_loops
def test_connections_count_before_their_handshake_is_done(tmp_path: Path, loop: Loop) -> None:
    async def check() -> None:
        limits = ConnectionLimits(6)
        async with serving(tmp_path, limits) as (address, trust):
            silent = await opened(address)
            begun = await opened(address, hello())
            wrong = await opened(address, b"GET / HTTP/1.1\r\n\r\n")
            assert await is_ended(wrong)
            await eventually(lambda: limits.num_open == 2)
            more = [await opened(address, hello()) for _ in range(2)]
            assert await is_ended(silent), "half of the connections may be of one address: the oldest makes room"
            assert await echo(address, trust, b"a") == b"a"
            assert await is_ended(begun)
            for client in more:
                client.close()
            await eventually(lambda: limits.num_open == 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


@on_both_loops
def test_the_oldest_unfinished_handshake_makes_room_for_a_new_one(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_UNFINISHED", 2)

    async def check() -> None:
        async with serving(tmp_path, ConnectionLimits(100)) as (address, trust):
            begun = []
            for _ in range(3):
                begun.append(await opened(address, hello()))
                assert await asyncio.get_running_loop().sock_recv(begun[-1], 1), "the handshake has begun"
            assert await is_ended(begun[0])
            assert await echo(address, trust, b"a") == b"a"
            assert await is_ended(begun[1])
            begun[2].close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


@on_both_loops
def test_a_handshake_that_does_not_end_is_closed_in_time(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def check() -> None:
        limits = ConnectionLimits(100)
        async with serving(tmp_path, limits) as (address, _), asyncio.timeout(WAIT_LIMIT_S):
            assert await is_ended(await opened(address))
            assert await is_ended(await opened(address, hello()[:20]))
            assert await is_ended(await opened(address, hello()))
            await eventually(lambda: limits.num_open == 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())

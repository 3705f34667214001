"""Connections to engines: addresses of every form, and hosts that cannot be reached."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pagemill_gateway.engine_http.connecting import CannotConnect, Connector, Origin, origin_of
from pagemill_servers.tls.certificates import EngineTrust


async def connected(origin: Origin) -> None:
    connection = await Connector(0.5, EngineTrust()).connect(origin, Once)
    connection.transport.close()


class Once(asyncio.Protocol):
    transport: asyncio.BaseTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


async def listening(host: str) -> asyncio.Server:
    return await asyncio.start_server(lambda reader, writer: writer.close(), host, 0)


@pytest.mark.parametrize(("host", "listens_at"), [("localhost", "localhost"), ("::1", "::1")])
async def test_names_and_ipv6_addresses_are_resolved(host: str, listens_at: str) -> None:
    async with await listening(listens_at) as server:
        await connected(Origin(host, server.sockets[0].getsockname()[1], False, host))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_port_without_a_listener_refuses(host: str) -> None:
    """The result does not depend on the number of addresses that the name has."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(CannotConnect) as caught:
            await connected(origin_of(f"http://{host}:{bound.getsockname()[1]}"))
    assert caught.value.refused


async def test_unknown_hosts_and_hosts_that_do_not_answer_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        # The second one accepts the connection and never answers the beginning of TLS.
        for origin in (Origin("unknown.invalid", port, False, "x"), Origin("127.0.0.1", port, True, "x")):
            with pytest.raises(CannotConnect) as caught:
                await connected(origin)
            assert not caught.value.refused


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

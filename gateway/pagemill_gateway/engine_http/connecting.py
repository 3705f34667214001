"""Connects to an engine, trying all addresses of its host, with TLS for `https` URLs; builds the head of a request."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from pagemill_protocol.versions import PROTOCOL_HEADER, PROTOCOL_VERSION

Connection = TypeVar("Connection", bound=asyncio.Protocol)


class CannotConnect(Exception):
    """The connection failed, and nothing was sent. The cause is the error of the last address.

    `refused`: no process listens on the port; otherwise there was no valid response in time.
    """

    def __init__(self, *, refused: bool) -> None:
        super().__init__("An engine cannot be reached.")
        self.refused = refused


class Origin(NamedTuple):
    host: str
    port: int
    is_tls: bool
    host_header: str


@lru_cache(maxsize=4096)
def origin_of(base_url: str) -> Origin:
    """Parse the URL of an engine. Raises `ValueError` if it is invalid."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is no address of a server")
    is_tls = parts.scheme == "https"
    host = parts.hostname if ":" in parts.hostname else parts.hostname.encode("idna").decode("ascii")
    named = f"[{host}]" if ":" in host else host
    host_header = named if parts.port is None else f"{named}:{parts.port}"
    return Origin(host, parts.port or (443 if is_tls else 80), is_tls, host_header)


def request_head(request: str, origin: Origin, token: str, *fields: str) -> bytes:
    """Return the head of a request. `request` is method and path. Raises `ValueError` for invalid header values."""
    lines = (
        f"{request} HTTP/1.1",
        f"Host: {origin.host_header}",
        f"Authorization: Bearer {token}",
        f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}",
        *fields,
    )
    if not "".join(lines).isprintable():
        raise ValueError("a value that is no line of text")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connector:
    def __init__(self, timeout_s: float, trust: ssl.SSLContext) -> None:
        """`timeout_s` applies to each address; `trust` verifies engines with `https` URLs."""
        self._timeout_s = timeout_s
        self._trust = trust

    async def connect(self, origin: Origin, make: Callable[[], Connection]) -> Connection:
        """Connect to the first address of the host that accepts. Raises `CannotConnect`."""
        is_refused, cause = True, None
        for address in await _addresses(origin):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._connect_to(address, origin, make)
            except OSError as error:  # including time-outs and TLS errors
                is_refused, cause = is_refused and error.errno == errno.ECONNREFUSED, error
        raise CannotConnect(refused=is_refused) from cause

    async def _connect_to(self, address: str, origin: Origin, make: Callable[[], Connection]) -> Connection:
        context = self._trust if origin.is_tls else None
        server_hostname = origin.host if origin.is_tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            make, address, origin.port, ssl=context, server_hostname=server_hostname
        )
        return connection


async def _addresses(origin: Origin) -> list[str]:
    if _is_address(origin.host):
        return [origin.host]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotConnect(refused=False) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""What the connections of one port may hold together: their number, in all and per client, and the memory of heads.

A connection counts for its address, or for its tenant once a request has had a valid key: clients behind one address do
not take each other's places. At a limit, the connection that has been idle for longest makes room for a new one; where
all are busy, the new one is refused. `connection` asks here before it spends anything on a client. A connection of a
trusted proxy counts for the address that it forwards for, while it has a request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import lru_cache

from pagemill_protocol.errors import PagemillError, unavailable

logger = logging.getLogger(__name__)

DEFAULT_MAX_CONNECTIONS = 12_000
MAX_CONTROL_CONNECTIONS = 1024
"""Connections of a control port, which only the platform calls."""
MAX_HEAD_BYTES = 64 * 1024 * 1024
"""Bytes of heads, and of requests read ahead, of all connections beyond `FREE_HEAD_BYTES` of each."""
MAX_BEGUN = 64
"""Requests that begin in one turn: some milliseconds to some tens of milliseconds of work."""
FREE_HEAD_BYTES = 8 * 1024
"""Bytes that every connection may hold, so that ordinary heads are read while others fill the budget."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ConnectionLimits:
    """The limits of one port, and its open connections."""

    def __init__(
        self,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        trusted_proxies: Iterable[str] = (),
        *,
        max_head_bytes: int = MAX_HEAD_BYTES,
    ) -> None:
        """`trusted_proxies`: addresses and networks whose header `X-Forwarded-For` names the client.

        Raises `ValueError` for one that is neither.
        """
        self.max_connections = max_connections
        self.max_per_client = max(1, max_connections // 2)
        self.max_head_bytes = max_head_bytes
        self.num_head_bytes = 0
        self._trusted = trusted_networks(trusted_proxies)
        self._num_open = 0
        self._clients: dict[Hashable, _Client] = {}
        self._idle: dict[Place, None] = {}
        """Idle connections without a valid key, those that have been idle for longest first."""
        self._idle_keyed: dict[Place, None] = {}

    @property
    def num_open(self) -> int:
        return self._num_open

    def open(self, host: str | None, close: Callable[[], None]) -> Place:
        """Count a new connection; `close` ends it at once if it must make room. `host`: `None` for Unix sockets.

        Raises `PagemillError` 503 if there is no place.
        """
        is_proxy = host is not None and self.is_trusted(host)
        client = None if host is None or is_proxy else self._client(client_network(host))
        try:
            if client is not None:
                self._make_room_for(client)
            if self._num_open >= self.max_connections and not _close_oldest(self._idle, self._idle_keyed):
                raise _no_place(f"{self._num_open} connections are open, which is the limit `max_connections`.")
        except PagemillError:
            self._drop_if_unused(client)
            raise
        place = Place(self, client, close, is_proxy=is_proxy)
        self._num_open += 1
        if client is not None:
            client.num_open += 1
        place.become_idle()
        return place

    def is_trusted(self, host: str) -> bool:
        return bool(self._trusted) and _is_within(host, self._trusted)

    def forwarded_client(self, values: Collection[bytes], proxy: str) -> Hashable:
        """Return the last address in `X-Forwarded-For` that is not a trusted proxy's; else the proxy's own."""
        hops = [hop.strip() for hop in b",".join(values).decode("latin-1").split(",")]
        for hop in reversed(hops):
            host = _without_port(hop)
            if host is None:
                break
            if not self.is_trusted(host):
                return client_network(host)
        return client_network(proxy)

    def _client(self, key: Hashable) -> _Client:
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = _Client(key)
        return client

    def _drop_if_unused(self, client: _Client | None) -> None:
        if client is not None and not client.num_open:
            self._clients.pop(client.key, None)

    def _make_room_for(self, client: _Client) -> None:
        if client.num_open >= self.max_per_client and not _close_oldest(client.idle):
            raise _no_place(
                f"This client has {client.num_open} busy connections, which is its limit: half of `max_connections`."
            )

    def _move(self, place: Place, client: _Client | None) -> None:
        before = place.client
        if before is not None:
            before.num_open -= 1
            before.num_head_bytes -= place.num_charged_bytes
        if client is not None:
            client.num_open += 1
            client.num_head_bytes += place.num_charged_bytes
        place.client = client
        self._drop_if_unused(before)


class _Client:
    """The connections of one address or tenant."""

    __slots__ = ("idle", "key", "num_head_bytes", "num_open")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.num_open = 0
        self.num_head_bytes = 0
        self.idle: dict[Place, None] = {}


class Place:
    """The place of one connection within the limits; `release` gives it back."""

    __slots__ = ("_close", "_is_keyed", "_is_open", "_limits", "client", "is_proxy", "num_charged_bytes")

    def __init__(
        self, limits: ConnectionLimits, client: _Client | None, close: Callable[[], None], *, is_proxy: bool
    ) -> None:
        self._limits = limits
        self._close = close
        self._is_keyed = False
        self._is_open = True
        self.client = client
        self.is_proxy = is_proxy
        self.num_charged_bytes = 0

    def become_idle(self) -> None:
        """Count as a connection without a request that is being answered, which may have to make room."""
        if not self._is_open:
            return
        if self.is_proxy and self.client is not None:
            self._limits._move(self, None)
        (self._limits._idle_keyed if self._is_keyed else self._limits._idle)[self] = None
        if self.client is not None:
            self.client.idle[self] = None

    def become_busy(self) -> None:
        self._limits._idle_keyed.pop(self, None)
        self._limits._idle.pop(self, None)
        if self.client is not None:
            self.client.idle.pop(self, None)

    def forward_for(self, client_key: Hashable) -> None:
        """Count a proxy's busy connection for the client of its request. Raises `PagemillError` 503."""
        self._count_for(client_key)

    def authenticated(self, tenant: str | None) -> None:
        """Count a busy connection for the tenant whose valid key its request has; `None`: for the platform itself.

        Raises `PagemillError` 503 if the tenant has no further place.
        """
        self._is_keyed = True
        if tenant is not None:
            self._count_for(("tenant", tenant))
        elif self.client is not None:
            self._limits._move(self, None)

    def hold(self, num_bytes: int) -> bool:
        """Count the bytes that this connection holds of heads and requests read ahead, in place of those before.

        Return false, and change nothing, if they exceed the budget of all or half of it for one client.
        """
        limits, client = self._limits, self.client
        charged = num_bytes - FREE_HEAD_BYTES if num_bytes > FREE_HEAD_BYTES else 0
        change = charged - self.num_charged_bytes
        if not change or not self._is_open:
            return True
        if change > 0:
            if limits.num_head_bytes + change > limits.max_head_bytes:
                return False
            if client is not None and client.num_head_bytes + change > limits.max_head_bytes // 2:
                return False
        self.num_charged_bytes = charged
        limits.num_head_bytes += change
        if client is not None:
            client.num_head_bytes += change
        return True

    def release(self) -> None:
        """Give the place back. It may be released again."""
        if not self._is_open:
            return
        self.become_busy()
        self.hold(0)
        self._is_open = False
        self._limits._move(self, None)
        self._limits._num_open -= 1

    def make_room(self) -> None:
        self.release()
        self._close()

    def _count_for(self, key: Hashable) -> None:
        limits = self._limits
        if not self._is_open or (self.client is not None and self.client.key == key):
            return
        client = limits._client(key)
        limits._make_room_for(client)
        limits._move(self, client)


def trusted_networks(proxies: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of addresses and networks. Raises `ValueError` for the first that is neither."""
    return tuple(ipaddress.ip_network(each, strict=False) for each in proxies)


@lru_cache(maxsize=4096)
def client_network(host: str) -> str:
    """Return what one client has: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


@lru_cache(maxsize=4096)
def unmapped(host: str) -> str:
    """Return the IPv4 address of `::ffff:192.0.2.1`, as a socket for both families names a client over IPv4; any other
    host as it is."""
    try:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
    except ValueError:
        return host
    return host if mapped is None else str(mapped)


def within_open_files(max_connections: int) -> int:
    """Return the number of connections for which this process may open files, at most `max_connections`.

    Raises this process's soft limit to its hard limit. A quarter of the files stays for everything else.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    available = max_connections if hard == resource.RLIM_INFINITY else hard * 3 // 4
    if available < max_connections:
        logger.warning("connections are limited to %d by the limit of open files, %d", available, hard)
    return min(max_connections, available)


@lru_cache(maxsize=4096)
def _is_within(host: str, networks: tuple[Network, ...]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in each for each in networks)


def _without_port(hop: str) -> str | None:
    """Return the address of a hop such as `1.2.3.4:80` or `[::1]:80`; `None` if it has none."""
    host = hop[1:].partition("]")[0] if hop.startswith("[") else hop
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        return unmapped(str(ipaddress.ip_address(host)))
    except ValueError:
        return None


def _close_oldest(*idle: dict[Place, None]) -> bool:
    """Close the connection that has been idle for longest. Return whether there was one."""
    for places in idle:
        if places:
            next(iter(places)).make_room()
            return True
    return False


def _no_place(fault: str) -> PagemillError:
    return unavailable(f"{fault} Close some, or try again.", retry_after_s=1, code="too_many_connections")


class Turns:
    """Spreads the beginning of requests, and the parsing of small chunks, over turns of the event loop, so that
    thousands at once delay no stream.

    They begin in order of arrival, and at once while few arrive.
    """

    def __init__(self, max_begun: int = MAX_BEGUN) -> None:
        self._max_begun = max_begun
        self._num_begun = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def begin(self, request: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call `request` now, or in a later turn if many have begun in this one."""
        if self._waiting or self._num_begun >= self._max_begun:
            self._waiting.append(request)
            return
        self._num_begun += 1
        request()
        self._schedule(loop)

    def wait(self, work: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call `work` in a later turn."""
        self._waiting.append(work)
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next_turn, loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        num_begun = min(self._max_begun, len(self._waiting))
        self._num_begun = num_begun
        self._is_scheduled = bool(num_begun)
        if num_begun:
            loop.call_soon(self._next_turn, loop)
        for _ in range(num_begun):
            self._waiting.popleft()()

"""Access to a connection below the ASGI messages: write to a response that has begun, learn at once that its client
disconnects, and take over the connection for another protocol.

`connection` offers these as ASGI extensions of each request; where an extension is missing, an app uses messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Scope

from pagemill_servers.connection_limits import Place

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

RESPONSE_EXTENSION = "pagemill.response"
UPGRADE_EXTENSION = "pagemill.upgrade"
PLACE_EXTENSION = "pagemill.place"


class DirectResponse:
    """The response to one request. Its head and its end are ASGI messages; chunks between them are written directly."""

    __slots__ = ("_cycle", "_held", "on_disconnect")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._held: _CorkedTransport | None = None
        self.on_disconnect: Callable[[], None] | None = None
        """Called when the client disconnects before the response is complete."""

    @property
    def is_disconnected(self) -> bool:
        return self._cycle.disconnected

    @property
    def has_body(self) -> bool:
        """Whether the whole body of the request has arrived."""
        return not self._cycle.more_body

    @property
    def is_slow(self) -> bool:
        """Whether the client has not read what was written, so that the next write waits."""
        return self._cycle.flow.write_paused

    def abort(self) -> None:
        """Close the connection at once, without sending the rest: the response remains incomplete."""
        self._cycle.disconnected = True
        self._cycle.transport.abort()

    def write_now(self, data: bytes) -> bool:
        """Write one chunk, which must not be empty.

        Return false and do nothing unless the response has begun, is chunked, and the client reads fast enough.
        """
        cycle = self._cycle
        if (
            not cycle.response_started
            or cycle.response_complete
            or cycle.chunked_encoding is not True
            or cycle.flow.write_paused
        ):
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def cork(self) -> None:
        """Collect what is written, and send it in one write.

        It is sent at `uncork`, at the end of the response, or in the next turn of the event loop.
        """
        if self._held is None:
            cycle: Any = self._cycle
            self._held = cycle.transport = _CorkedTransport(cycle.transport)
            asyncio.get_running_loop().call_soon(self.uncork)

    def uncork(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._cycle.transport = held.transport
            held.send()


class _CorkedTransport:
    """Collects writes in place of a transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def send(self) -> None:
        if self._pieces:
            self.transport.write(b"".join(self._pieces))
            self._pieces = []

    def close(self) -> None:
        self.send()
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()


class UpgradedProtocol(asyncio.Protocol):
    """A protocol that takes over a connection from HTTP."""

    on_lost: Callable[[], None] = staticmethod(lambda: None)
    """Set by the server: to be called when the connection is lost."""

    def shutdown(self) -> None:
        """Close as soon as everything begun is sent, because the server ends."""
        raise NotImplementedError


class TakeOver(Protocol):
    """Answers 101 and hands over the connection; nothing else may be sent for the request."""

    def __call__(self, successor: UpgradedProtocol, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """`headers`: further ones of the answer."""
        ...


def direct_response(scope: Scope) -> DirectResponse | None:
    found = scope.get("extensions", {}).get(RESPONSE_EXTENSION)
    return found if isinstance(found, DirectResponse) else None


def count_for_tenant(scope: Scope, tenant: str | None) -> None:
    """Count the connection of a request with a valid key for its tenant (`None`: the platform), not for its address.

    Raises `PagemillError` 503 if the tenant has too many connections.
    """
    place: Place | None = scope.get("extensions", {}).get(PLACE_EXTENSION)
    if place is not None:
        place.authenticated(tenant)


def upgrade_of(scope: Scope) -> TakeOver | None:
    """Return the function that takes over the connection, or None.

    None: the client did not offer one of the server's protocols, or the connection has other requests.
    """
    found: TakeOver | None = scope.get("extensions", {}).get(UPGRADE_EXTENSION)
    return found

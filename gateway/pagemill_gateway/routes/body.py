"""Reads request bodies, counting the bytes while they arrive, and refuses them when they exceed the gate's limit.

`pagemill_servers.request_middleware` limits size and time of a single body.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from pagemill_gateway.admission.in_flight_limit import InFlightSlot
from pagemill_protocol.errors import PagemillError
from pagemill_servers.request_middleware import header, read_body


async def read_counted(scope: Scope, receive: Receive, slot: InFlightSlot, max_body_bytes: int) -> bytes:
    """Return the body, counted in `slot`. Raises `PagemillError` 503 beyond the limit, 499 if the client leaves."""
    more = True

    async def counted() -> Message:
        nonlocal more
        message = await receive()
        more = message["type"] == "http.request" and message.get("more_body", False)
        slot.hold(len(message.get("body", b"")))
        return message

    try:
        declared = int(header(scope, b"content-length") or 0)
        if declared <= max_body_bytes:  # otherwise the body is refused for its own size
            slot.expect(declared)
        return await read_body(counted)
    except PagemillError as error:
        # The rest is read and dropped, because a sender that is cut off within its body gets a reset, not the response.
        while error.status == 503 and more and header(scope, b"expect") is None:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
        raise

"""Reads request bodies, counting the bytes while they arrive, and refuses them when they exceed the gate's limit.

`http.request_middleware` limits size and time of a single body.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from pagemill_gateway.admission.in_flight_limit import InFlightSlot
from pagemill_protocol.http.request_middleware import header, read_body


async def read_counted(scope: Scope, receive: Receive, slot: InFlightSlot, max_body_bytes: int) -> bytes:
    """Return the body, counted in `slot`. Raises `PagemillError` 503 beyond the limit, 499 if the client leaves."""

    async def counted() -> Message:
        message = await receive()
        slot.hold(len(message.get("body", b"")))
        return message

    declared = int(header(scope, b"content-length") or 0)
    if declared <= max_body_bytes:  # otherwise the body is refused for its own size
        slot.expect(declared)
    return await read_body(counted)

"""Reads request bodies: counted while they arrive, refused as soon as they exceed the gate's bound.

Size and time of a single body are bounded outside, by `http.door`.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from pagemill_gateway.admission.gate import GateSlot
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.http.door import header, read_body


async def read_counted(scope: Scope, receive: Receive, slot: GateSlot, max_body_bytes: int) -> bytes:
    """The whole body, held in `slot`. Raises `PagemillError` 503 beyond the bound, 499 when the client leaves first."""
    more = True

    async def counted() -> Message:
        nonlocal more
        message = await receive()
        more = message["type"] == "http.request" and message.get("more_body", False)
        slot.hold(len(message.get("body", b"")))
        return message

    try:
        declared = int(header(scope, b"content-length") or 0)
        if declared <= max_body_bytes:  # otherwise it is too large at any time
            slot.expect(declared)
        return await read_body(counted)
    except PagemillError as error:
        # The rest is read and dropped: a sender that is cut off within its body sees a reset, not the answer.
        while error.status == 503 and more and header(scope, b"expect") is None:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
        raise

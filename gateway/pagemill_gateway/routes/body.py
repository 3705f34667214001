"""Request bodies as the gateway takes them in: counted while they arrive, refused as soon as they find no room.

Size and time of a single body are bounded outside, by `http.door`.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from pagemill_gateway.admission.gate import GateSlot
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.http.door import header, read_body


async def read_counted(scope: Scope, receive: Receive, slot: GateSlot, max_body_bytes: int) -> bytes:
    """The whole body, held in `slot`. Raises `PagemillError` 503 without room, 499 when the client leaves first."""
    more = True

    async def counted() -> Message:
        nonlocal more
        message = await receive()
        more = message["type"] == "http.request" and message.get("more_body", False)
        slot.hold(len(message.get("body", b"")))
        return message

    try:
        declared = int(header(scope, b"content-length") or 0)
        if declared <= max_body_bytes:  # else it is too large at any time
            slot.expect(declared)
        return await read_body(counted)
    except PagemillError as error:
        # The rest is read and dropped: a sender who is cut off mid-body sees a reset, not the answer.
        while error.status == 503 and more and header(scope, b"expect") is None:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
        raise

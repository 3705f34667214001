"""Reads request bodies, counting the bytes while they arrive, and refuses them when they exceed the gate's limit.

`pagemill_servers.request_middleware` limits size and time of a single body.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Receive, Scope

from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_protocol.errors import client_closed_request
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_servers.request_middleware import header

TOKEN_BYTES = 40
"""The memory of a token id in a list, and in the encoded request."""
VALUE_BYTES = 64
"""The assumed memory of a parsed value besides its text: an empty list has 56 bytes, a short text 50 or more."""
WIDE_CHARS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4", b"\\ud", b"\\uD")
"""What a body with a character beyond 16 bits contains. Python then stores each character of its text in four bytes."""


async def read_counted(scope: Scope, receive: Receive, slot: InFlightSlot, max_body_bytes: int) -> bytes:
    """Return the body, counted in `slot`, also in its parsed form.

    Raises `PagemillError` 429 or 503 beyond the limit, 499 if the client leaves.
    """
    declared = int(header(scope, b"content-length") or 0)
    if declared <= max_body_bytes:  # otherwise the body is refused for its own size
        slot.expect(declared)
    body, more = bytearray(), True
    while more:
        message = await receive()
        more = _has_more(message)
        data = message.get("body", b"")
        slot.hold(len(data))
        if not more and not body:
            return _parsed_counted(data, slot)
        body += data
    return _parsed_counted(bytes(body), slot)


def parsed_bytes(raw: bytes) -> int:
    """Return about how much memory the parsed form of a JSON text takes."""
    char_bytes = 1
    if not raw.isascii() or b"\\u" in raw:
        char_bytes = 4 if any(each in raw for each in WIDE_CHARS) else 2
    return char_bytes * len(raw) + VALUE_BYTES * (raw.count(b",") + raw.count(b"[") + raw.count(b"{"))


def prepared_bytes(requests: Sequence[GenerateRequest]) -> int:
    """Return about how much memory the engine requests of a body take."""
    return sum(TOKEN_BYTES * len(each.prompt_token_ids) for each in requests)


def _has_more(message: Message) -> bool:
    if message["type"] != "http.request":
        raise client_closed_request()
    return bool(message.get("more_body", False))


def _parsed_counted(raw: bytes, slot: InFlightSlot) -> bytes:
    # A text of small values may take more memory than all requests may have. It is admitted while there is half of it.
    slot.hold(max(0, min(parsed_bytes(raw), slot.max_bytes // 2 - len(raw))))
    return raw

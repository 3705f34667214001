"""The client of a request that the gateway sends to its own app: a line of a batch, a response in the background.

Its whole body is there from the beginning. Subclasses take the answer in `send`.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message


class InnerClient:
    """ASGI messages of the client."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._has_left = asyncio.Event()

    @property
    def has_left(self) -> bool:
        return self._has_left.is_set()

    def leave(self) -> None:
        """Disconnect: the rest of the answer is not wanted."""
        self._has_left.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

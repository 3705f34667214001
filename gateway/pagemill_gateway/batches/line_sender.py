"""Sends one line of a batch through the same routes as a live request, with its limits, metrics, log and errors.

The caller is the API key that created the batch. It is looked up for each line, so a revoked key gets no more answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from pagemill_protocol.errors import PagemillError, error_body, unauthorized
from pagemill_servers.keys.ring import KeyRing

RETRIED = frozenset({429, 503})
"""The statuses of limits and overload, after which a line is sent again."""
DEFAULT_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class LineReply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def waits(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in RETRIED and self.headers.get("x-should-retry") != "false"

    @property
    def pause_s(self) -> float:
        given = self.headers.get("retry-after", "")
        return min(float(given), MAX_PAUSE_S) if given.isdigit() else DEFAULT_PAUSE_S


class LineSender:
    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        """`app` has the generating routes and the access log."""
        self._app = app
        self._keys = keys

    async def send(self, path: str, body: bytes, key_hash: str, request_id: str) -> LineReply:
        caller = self._keys.by_hash(key_hash)
        if caller is None:
            return _refused(unauthorized("The API key that made this batch is not accepted any more."))
        reply = _Collected()
        body_left = [body]

        async def receive() -> Message:
            if not body_left:
                await asyncio.Event().wait()  # this client never disconnects
            return {"type": "http.request", "body": body_left.pop(), "more_body": False}

        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "state": {"request_id": request_id, "caller": caller._replace(is_batch=True)},
        }
        await self._app(scope, receive, reply.send)
        return reply.reply()


class _Collected:
    def __init__(self) -> None:
        self._status = 500
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self._parts.append(message.get("body", b""))

    def reply(self) -> LineReply:
        return LineReply(self._status, self._headers, b"".join(self._parts))


def _refused(error: PagemillError) -> LineReply:
    return LineReply(error.status, {}, error_body(error))

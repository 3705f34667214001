"""The ASGI middleware that counts the large answers of routes which no engine serves, such as files and token counts.

A large body is sent in pieces, and counted with the other requests until its client has read it (`admission`).
Generating routes count their answers themselves.
"""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill_api.dialects.error_shapes import error_body_at
from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.routes.client import PIECE_BYTES
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError
from pagemill_servers.errors import error_response, note_error


class CountedAnswers:
    def __init__(self, app: ASGIApp, worker: Worker) -> None:
        self._app = app
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            answer = _Answer(self._worker, scope, send, held)
            await self._app(scope, receive, answer.send)


class _Answer:
    def __init__(self, worker: Worker, scope: Scope, send: Send, held: ExitStack) -> None:
        self._worker = worker
        self._scope = scope
        self._send = send
        self._held = held
        self._start: Message | None = None
        """The start message, which is sent with the first part of the body, because that may be refused."""
        self._slot: InFlightSlot | None = None
        self._is_refused = False

    async def send(self, message: Message) -> None:
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        body: bytes = message.get("body", b"")
        is_large = len(body) > PIECE_BYTES
        if is_large:
            try:
                self._count(len(body))
            except PagemillError as error:
                await self._refuse(error)
                return
        await self._begin()
        if not is_large:
            await self._send(message)
            return
        for start in range(0, len(body), PIECE_BYTES):
            await self._send({**message, "body": body[start : start + PIECE_BYTES], "more_body": True})
        if not message.get("more_body", False):
            # It is sent when the client has read the pieces before.
            await self._send({**message, "body": b"", "more_body": False})

    def _count(self, num_bytes: int) -> None:
        """Count a body, or the largest part of one. Raises `PagemillError` 429 or 503."""
        if self._slot is None:
            record: RequestRecord = self._scope["state"]["record"]
            self._slot = self._held.enter_context(self._worker.in_flight_limit.enter(record.account))
        self._slot.resize(max(num_bytes, self._slot.num_bytes))

    async def _begin(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            await self._send(start)

    async def _refuse(self, error: PagemillError) -> None:
        self._is_refused = True
        note_error(self._scope, error)
        if self._start is None:
            raise error  # a part of the answer was sent; the server closes the connection
        response = error_response(error, error_body=error_body_at(self._scope["path"]))
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": False})

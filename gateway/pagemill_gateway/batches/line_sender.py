"""Sends one line of a batch through the same routes as a live request, with its limits, metrics, log and errors.

The caller is the API key that created the batch. It is looked up for each line, so a revoked key gets no more answers.
The answer is written to an `AnswerFile` as it arrives. If that takes no more, the line leaves like a client that
disconnects, so that the engine does not work for nothing.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from pagemill_gateway.batches.answer_file import AnswerFile
from pagemill_gateway.inner_client import InnerClient
from pagemill_protocol.errors import PagemillError, error_body, unauthorized
from pagemill_servers.keys.ring import KeyRing

RETRIED = frozenset({429, 503})
"""The statuses of limits and overload, after which a line is sent again."""
DEFAULT_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class LineReply(NamedTuple):
    status: int
    headers: dict[str, str]

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_json(self) -> bool:
        return self.headers.get("content-type", "").partition(";")[0].strip() == "application/json"

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

    async def send(self, path: str, body: bytes, key_hash: str, request_id: str, answer: AnswerFile) -> LineReply:
        """Write the body of the answer to `answer`. Raises `PagemillError` if it cannot be written."""
        caller = self._keys.by_hash(key_hash)
        if caller is None:
            refused = unauthorized("The API key that made this batch is not accepted any more.")
            return await _failed(refused, answer)
        client = _Client(body, answer)
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "state": {"request_id": request_id, "caller": caller._replace(is_batch=True)},
        }
        del body  # it is the client's now, which gives it away
        try:
            await self._app(scope, client.receive, client.send)
        except PagemillError as error:  # the answer broke off after its beginning
            client.broken = error
        if client.failure is not None:
            raise client.failure
        if client.broken is not None:
            return await _failed(client.broken, answer)
        return LineReply(client.status, client.headers)


class _Client(InnerClient):
    """One line's client."""

    def __init__(self, body: bytes, answer: AnswerFile) -> None:
        super().__init__(body)
        self.status = 500
        self.headers: dict[str, str] = {}
        self.failure: PagemillError | None = None
        """Why the answer could not be written."""
        self.broken: PagemillError | None = None
        """Why the answer is incomplete."""
        self._answer = answer

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            return
        if self.has_left:
            return
        try:
            await self._answer.write(message.get("body", b""))
        except PagemillError as error:
            self.failure = error
        if self.failure is not None or self._answer.is_too_large:
            self.leave()


async def _failed(error: PagemillError, answer: AnswerFile) -> LineReply:
    """Return the error as the reply, with its body in place of what `answer` has."""
    answer.clear()
    await answer.write(error_body(error))
    return LineReply(error.status, {"content-type": "application/json"})

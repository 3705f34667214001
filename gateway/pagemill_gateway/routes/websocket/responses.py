"""The route `GET /v1/responses` of a WebSocket: its handshake, and its messages one after the other.

A connection has the caller of its handshake. The key is looked up again for each message, so that a revoked one gets
no more answers.
"""

from __future__ import annotations

import base64
import binascii

from starlette.types import Receive, Scope, Send
from websockets.frames import CloseCode
from websockets.utils import accept_key

from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.routes.access import record_of
from pagemill_gateway.routes.websocket.connection import MessageBounds, WebSocketConnection
from pagemill_gateway.routes.websocket.turn import Chain, Headers, TurnClient, TurnRoute, read_turn, refusal
from pagemill_gateway.stored_responses.store import MemoryResponses
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_servers.cors import EVERY_ORIGIN
from pagemill_servers.direct import PLACE_EXTENSION, upgrade_of
from pagemill_servers.errors import error_response
from pagemill_servers.origin import check_same_origin
from pagemill_servers.request_middleware import TIMEOUT_HEADER, header

PROTOCOL = "websocket"
VERSION = "13"
_KEPT_HEADERS = (TIMEOUT_HEADER, b"traceparent", b"tracestate")
"""Headers of the handshake that count for each response."""


class WebSocketRoute:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._config = worker.config.stored_responses or StoredResponsesConfig()
        self._chains = MemoryResponses(StoredResponsesConfig())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        try:
            caller = self._worker.keys.authenticate(scope)
            record.called_by(caller)
            self._check_origin(scope)
            take_over = upgrade_of(scope)
            key = header(scope, b"sec-websocket-key") or ""
            if take_over is None or header(scope, b"sec-websocket-version") != VERSION:
                raise _not_a_handshake()
            if not _is_key(key):
                raise invalid_field("sec-websocket-key", "The header Sec-WebSocket-Key must be 16 bytes in Base64.")
        except PagemillError as error:
            record.failed(error)
            response = error_response(error)
            if error.status == 426:
                response.headers.update({"upgrade": PROTOCOL, "sec-websocket-version": VERSION})
            await response(scope, receive, send)
            return
        record.status = 101
        messages = _Messages(self._worker, self._config, Chain(self._chains), scope)
        limit, config = self._worker.in_flight_limit, self._worker.config
        bounds = MessageBounds(config.max_body_bytes, config.body_timeout_s, config.websocket_idle_timeout_s)
        place = scope["extensions"].get(PLACE_EXTENSION)
        account = caller.account
        connection = WebSocketConnection(messages.serve, refusal, bounds, lambda: limit.take_slot(account), place)
        take_over(connection, [(b"Sec-WebSocket-Accept", accept_key(key).encode())])

    def _check_origin(self, scope: Scope) -> None:
        """Refuse web pages of other origins: browsers open such connections without asking."""
        allowed = self._worker.config.allowed_origins
        if EVERY_ORIGIN not in allowed and header(scope, b"origin") not in allowed:
            check_same_origin(scope, "allow its origin with the setting `allowed_origins`")


class _Messages:
    """The messages of one connection."""

    def __init__(self, worker: Worker, config: StoredResponsesConfig, chain: Chain, scope: Scope) -> None:
        self._worker = worker
        self._config = config
        self._chain = chain
        place = scope["extensions"].get(PLACE_EXTENSION)
        self._scope = {**scope, "state": {}, "extensions": {PLACE_EXTENSION: place}}
        self._headers: Headers = [each for each in scope["headers"] if each[0] in _KEPT_HEADERS]

    async def serve(self, connection: WebSocketConnection) -> None:
        try:
            while True:
                await self._answer(await connection.next_message(), connection)
                if self._worker.draining:
                    connection.close(CloseCode.GOING_AWAY, "The gateway is shutting down.")
        finally:
            await self._chain.forget()

    async def _answer(self, message: bytes, connection: WebSocketConnection) -> None:
        worker = self._worker
        try:
            caller = worker.keys.authenticate(self._scope)
        except PagemillError as error:
            await connection.send(refusal(error))
            connection.close(CloseCode.POLICY_VIOLATION, "The API key is not accepted any more.")
            return
        try:
            turn = await worker.preparation.parse(message, read_turn)
        except PagemillError as error:
            await connection.send(refusal(error))
            return
        del message
        route = TurnRoute(worker, self._config, self._chain, turn, connection)
        await TurnClient(turn.body, connection).run(route, worker, caller, self._headers)


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def _not_a_handshake() -> PagemillError:
    return PagemillError(
        "GET /v1/responses opens a WebSocket: send the headers `Connection: Upgrade`, `Upgrade: websocket` and "
        f"`Sec-WebSocket-Version: {VERSION}`. Other requests are sent with POST.",
        status=426,
        code="upgrade_required",
    )

"""One response of a WebSocket connection: the message `response.create` as a request to `POST /v1/responses`.

It passes the same route as a request by HTTP, with its limits, reservations, log line and metrics. The items of the
response before it come from the connection, whether or not the gateway stores responses.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import orjson
from starlette.types import Message

from pagemill_api.dialects.base import Dialect, Piece
from pagemill_api.dialects.openai_responses.responses import StoredResponsesDialect
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai.unread_fields import UNREAD_HEADER, unread_headers
from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.inner_client import InnerClient
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.routes.access import AccessLog
from pagemill_gateway.routes.body import parsed_bytes
from pagemill_gateway.routes.client import ClientResponse
from pagemill_gateway.routes.entry import EnteredRequest
from pagemill_gateway.routes.stored.conversations import StoredConversation
from pagemill_gateway.routes.stored.responses import PATH, ResponsesRoute, continued, response_not_found
from pagemill_gateway.routes.websocket.connection import Disconnected, WebSocketConnection
from pagemill_gateway.stored_responses.store import MemoryResponses
from pagemill_gateway.worker import Worker
from pagemill_protocol import nesting
from pagemill_protocol.errors import PagemillError, invalid_field, show
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import Usage
from pagemill_servers.keys.caller import Caller

CREATE = "response.create"
MAX_ERROR_BYTES = 64 * 1024
_END = b"\n\n"
_DATA = b"data: "
Item = dict[str, Any]
Headers = list[tuple[bytes, bytes]]


class SocketTurn(NamedTuple):
    body: bytes
    """That of the request."""
    generates: bool
    """Whether the model answers; otherwise only what the next response continues is prepared."""


def read_turn(raw: bytes) -> SocketTurn:
    """Read a message. Raises `PagemillError` 400."""
    try:
        given = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise PagemillError(f"The message is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(given, dict) or given.get("type") != CREATE:
        kind = given.get("type") if isinstance(given, dict) else given
        raise invalid_field("type", f'Messages must be objects of type "{CREATE}", got {show(kind)}.')
    nesting.check_value(given)
    for name, remedy in (
        ("stream_id", "Responses of one connection follow each other; open one connection for each lane."),
        ("background", "A response in the background has no connection; send it to POST /v1/responses."),
    ):
        if given.pop(name, None):
            raise invalid_field(name, f"`{name}` is not supported here. {remedy}", code="unsupported_parameter")
    generates = given.pop("generate", True)
    if not isinstance(generates, bool | None):
        raise invalid_field("generate", f"`generate` must be true or false, got {show(generates)}.")
    del given["type"]
    return SocketTurn(orjson.dumps({**given, "stream": True}), generates is not False)


class Chain:
    """What the next response of a connection may continue: the items of the last one."""

    def __init__(self, store: MemoryResponses) -> None:
        """`store`: bounds the memory of all connections; a chain that it drops is not found any more."""
        self._store = store
        self._account = ""
        self.response_id = ""

    async def items(self) -> bytes | None:
        return await self._store.get(self._account, self.response_id)

    async def keep(self, account: str, response_id: str, items: bytes) -> None:
        await self.forget()
        self._account, self.response_id = account, response_id
        await self._store.keep(account, response_id, items)

    async def forget(self) -> None:
        await self._store.remove(self._account, self.response_id)


class TurnRoute(ResponsesRoute):
    """The route of one turn."""

    def __init__(
        self,
        worker: Worker,
        config: StoredResponsesConfig,
        chain: Chain,
        turn: SocketTurn,
        connection: WebSocketConnection,
    ) -> None:
        super().__init__(worker, config)
        self._connection = connection
        self._chain = chain
        self._turn = turn

    async def _answer(
        self,
        raw: bytes,
        dialect: Dialect,
        entry: EnteredRequest,
        info: RequestInfo,
        client: ClientResponse,
        record: RequestRecord,
    ) -> None:
        client.is_slow = lambda: self._connection.is_slow
        if self._turn.generates:
            await super()._answer(raw, dialect, entry, info, client, record)
            return
        prepared = await self._worker.preparation.prepare(raw, dialect, entry.caller, info, record, client.write)
        client.add_headers(unread_headers(prepared.unread_fields))
        renderer = dialect.renderer(prepared.requests[0], None)
        await client.write(renderer.chunk(Piece(0, "", True, "stop", None, None)) + renderer.end(Usage()))
        await client.end()

    def _new_dialect(self, before: list[Item]) -> StoredResponsesDialect:
        return StoredResponsesDialect(before, may_store=self._worker.config.stored_responses is not None)

    def _keeps(self, dialect: StoredResponsesDialect) -> bool:
        return True

    async def _keep(self, caller: Caller, body: bytes, dialect: StoredResponsesDialect) -> None:
        if dialect.stores:
            await super()._keep(caller, body, dialect)
        response = orjson.loads(body)
        items = orjson.dumps([*dialect.input, *response["output"]])
        if len(items) <= self._config.max_response_bytes:
            await self._chain.keep(caller.account, response["id"], items)
        else:
            await self._chain.forget()

    async def _before(self, raw: bytes, entry: EnteredRequest) -> tuple[list[Item], StoredConversation | None]:
        previous, conversation = await self._worker.preparation.parse(raw, continued)
        if previous is None or conversation is not None:
            return await super()._before(raw, entry)
        kept = await self._chain.items() if previous == self._chain.response_id else None
        if kept is not None:
            entry.slot.hold(parsed_bytes(kept))
            return orjson.loads(kept), None
        if self._worker.config.stored_responses is None:
            raise response_not_found(previous, "previous_response_id")
        return await super()._before(raw, entry)


class MessagePart(NamedTuple):
    data: bytes
    is_first: bool
    is_last: bool


class EventMessages:
    """Server-sent events as messages: each is the data of one event.

    An event may arrive in parts, and its message is then sent in parts, so that a large one is never held as a whole.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_within = False
        """Whether the beginning of a message was returned and its end was not."""
        self._has_data = False

    @property
    def is_within(self) -> bool:
        return self._is_within

    def push(self, data: bytes) -> Iterator[MessagePart | None]:
        """Yield the parts of messages in the next bytes of a stream; None for a comment."""
        rest = self._rest + data if self._rest else data
        while rest:
            if not self._has_data:
                end, begin = rest.find(_END), rest.find(_DATA)
                if rest.startswith(b":") and end >= 0:
                    yield None
                    rest = rest[end + len(_END) :]
                    continue
                if rest.startswith(b":") or begin < 0:
                    break
                self._has_data = True
                rest = rest[begin + len(_DATA) :]
            end = rest.find(_END)
            is_last = end >= 0
            if not is_last:  # the last byte may be the first of the two that end the event
                end = len(rest) - rest.endswith(b"\n")
            if end or is_last:
                yield MessagePart(rest[:end], not self._is_within, is_last)
                self._is_within = not is_last
            rest = rest[end + len(_END) :] if is_last else rest[end:]
            if not is_last:
                break
            self._has_data = False
        self._rest = rest


class TurnClient(InnerClient):
    """Sends the answer as messages."""

    def __init__(self, body: bytes, connection: WebSocketConnection) -> None:
        super().__init__(body)
        self._connection = connection
        self._events = EventMessages()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._error = b""

    async def run(self, route: TurnRoute, worker: Worker, caller: Caller, headers: Headers) -> None:
        """Answer. Raises `Disconnected`."""
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [(b"content-type", b"application/json"), *headers],
            "state": {"request_id": new_id(), "caller": caller},
        }
        self._connection.on_disconnect = self.leave
        try:
            await AccessLog(route, worker)(scope, self.receive, self.send)
        except PagemillError:  # the answer broke off
            self._connection.abort()
            raise Disconnected from None
        finally:
            self._connection.on_disconnect = _nothing
        if self.has_left:
            raise Disconnected
        if self._events.is_within:
            self._connection.abort()
        elif self._status != 200:
            await self._connection.send(error_message(self._status, orjson.loads(self._error), self._headers))

    async def send(self, message: Message) -> None:
        try:
            if message["type"] == "http.response.start":
                await self._begin(message)
            elif self._status != 200:
                self._error = (self._error + message.get("body", b""))[:MAX_ERROR_BYTES]
            else:
                for part in self._events.push(message.get("body", b"")):
                    if part is None:
                        self._connection.ping()
                    else:
                        await self._connection.send(part.data, is_first=part.is_first, is_last=part.is_last)
        except Disconnected:
            self.leave()

    async def _begin(self, message: Message) -> None:
        self._status = message["status"]
        self._headers = {name.decode().lower(): value.decode() for name, value in message.get("headers", ())}
        if unread := self._headers.get(UNREAD_HEADER):
            named = {"type": "pagemill.unread_fields", "fields": unread.split(", ")}
            await self._connection.send(orjson.dumps(named))


def error_message(status: int, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """Return the message for an error. `body`: as by HTTP; `headers`: those of its response."""
    shown = {name: value for name, value in headers.items() if name.startswith(("retry-", "x-ratelimit-", "x-should-"))}
    return orjson.dumps({"type": "error", "status": status, "error": {**body["error"], "headers": shown}})


def refusal(error: PagemillError) -> bytes:
    return error_message(error.status, error.body(), {name.lower(): value for name, value in error.headers().items()})


def _nothing() -> None:
    pass

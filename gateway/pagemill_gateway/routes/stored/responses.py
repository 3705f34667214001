"""The routes `/v1/responses` of a gateway that stores responses: continue, show and delete a response.

`conversations` has those of conversations.

A stored response has the response that the client got and all its input items. It belongs to an account, which is a
tenant or a key without a tenant; for others it does not exist.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagemill_api.dialects.base import Dialect
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect, StoredResponsesDialect
from pagemill_api.dialects.transport import RequestInfo
from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.routes.access import AccessLog
from pagemill_gateway.routes.body import parsed_bytes
from pagemill_gateway.routes.client import ClientResponse
from pagemill_gateway.routes.entry import EnteredRequest, caller_of
from pagemill_gateway.routes.generate import GenerateRoute
from pagemill_gateway.routes.listing import page_of
from pagemill_gateway.routes.stored.background import (
    CANCELLED,
    RUNNING,
    BackgroundResponses,
    cancel,
    check_background,
    shown_response,
    was_cancelled,
)
from pagemill_gateway.routes.stored.conversations import (
    PREFIX,
    StoredConversation,
    StoredConversations,
    listed,
    not_stored,
)
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_servers.keys.caller import Caller

logger = logging.getLogger("pagemill.gateway.responses")

PATH = ResponsesDialect.path


class _StoredId(StringConvertor):
    """An id in a path, which is none of the routes beside it."""

    regex = "(?!(?:input_tokens|compact)$)[^/]+"


register_url_convertor("response", _StoredId())
BY_ID = f"{PATH}/{{id:response}}"
LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")


class ResponsesRoute(GenerateRoute):
    """`POST /v1/responses`. The response is stored before the client has got all of it."""

    def __init__(self, worker: Worker, config: StoredResponsesConfig) -> None:
        super().__init__(worker, ResponsesDialect())
        self._config = config
        self._background = BackgroundResponses(worker, AccessLog(self, worker), PATH, config.max_response_bytes)

    async def _answer(
        self,
        raw: bytes,
        dialect: Dialect,
        entry: EnteredRequest,
        info: RequestInfo,
        client: ClientResponse,
        record: RequestRecord,
    ) -> None:
        if b'"background"' not in raw or not isinstance(dialect, StoredResponsesDialect):
            await super()._answer(raw, dialect, entry, info, client, record)
            return
        body = await self._worker.preparation.parse(raw, dialect.parse)
        if not dialect.in_background:
            await super()._answer(raw, dialect, entry, info, client, record)
            return
        check_background(orjson.loads(raw), entry.caller)
        body.sampling()
        client.on_answer = None  # it is kept already
        begun = await self._background.begin(raw, entry.caller, body.shown, dialect.input)
        await client.send_body(orjson.dumps(begun))

    async def _dialect_for(self, raw: bytes, entry: EnteredRequest, client: ClientResponse) -> Dialect:
        before, conversation = await self._before(raw, entry)
        dialect = self._new_dialect(before)

        async def keep(data: bytes) -> None:
            body = _whole_response(data) if self._keeps(dialect) or conversation is not None else None
            if body is None:
                return
            if self._keeps(dialect):
                await self._keep(entry.caller, body, dialect)
            if conversation is not None:
                new = [*dialect.input[len(before) :], *orjson.loads(body)["output"]]
                await self._extend(entry.caller, conversation, new)

        client.on_answer, client.max_seen_bytes = keep, self._config.max_response_bytes
        return dialect

    def _new_dialect(self, before: list[dict[str, Any]]) -> StoredResponsesDialect:
        return StoredResponsesDialect(before)

    def _keeps(self, dialect: StoredResponsesDialect) -> bool:
        return dialect.stores

    async def _before(
        self, raw: bytes, entry: EnteredRequest
    ) -> tuple[list[dict[str, Any]], StoredConversation | None]:
        """Return the items of the previous response or of the conversation, and the conversation."""
        if b"previous_response_id" not in raw and b"conversation" not in raw:
            return [], None
        previous, conversation_id = await self._worker.preparation.parse(raw, continued)
        if previous is not None and conversation_id is not None:
            raise invalid_field(
                "conversation", "`conversation` and `previous_response_id` exclude each other. Send one of them."
            )
        if conversation_id is not None:
            conversations = StoredConversations(self._worker)
            found = await conversations.read(entry.caller, conversation_id, entry.slot, "conversation")
            return [*found.items], found
        if previous is None:
            return [], None
        kept = await stored_response(self._worker, entry.caller, previous, "previous_response_id", entry.slot)
        if shown_response(kept)["status"] in RUNNING:
            raise invalid_field("previous_response_id", "The previous response is not complete yet. Wait for it.")
        return [*kept["input"], *kept["response"]["output"]], None

    async def _extend(self, caller: Caller, conversation: StoredConversation, items: list[dict[str, Any]]) -> None:
        try:
            await StoredConversations(self._worker).extend(caller, conversation, items)
        except PagemillError as error:
            logger.warning("the conversation %s was not extended: %s", conversation.id, error)

    async def _keep(self, caller: Caller, body: bytes, dialect: StoredResponsesDialect) -> None:
        if len(body) > self._config.max_response_bytes:
            _too_large(len(body))
            return
        response = orjson.loads(body)
        response_id: str = response["id"]
        shown = [
            listed(item, f"{response_id.removeprefix('resp_')}_{index}") for index, item in enumerate(dialect.input)
        ]
        value = b'{"input":%s,"response":%s}' % (orjson.dumps(shown), body)
        if len(value) > self._config.max_response_bytes:
            _too_large(len(value))
            return
        await self._worker.control.keep_response(caller.account, response_id, value)


class StoredResponseRoutes:
    """The routes of `/v1/responses/{id}`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise PagemillError("Stored responses are not streamed again. Remove `stream`.", param="stream")
        async with self._stored(request) as stored:
            return JSONResponse(shown_response(stored))

    async def cancel(self, request: Request) -> Response:
        async with self._stored(request) as stored:
            return JSONResponse(await cancel(self._worker, caller_of(self._worker, request), stored))

    async def delete(self, request: Request) -> Response:
        caller, response_id = caller_of(self._worker, request), request.path_params["id"]
        control = self._worker.control
        if not _is_response(response_id) or not await control.forget_response(caller.account, response_id):
            raise response_not_found(response_id, None)
        await control.forget_response(caller.account, CANCELLED + response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        async with self._stored(request) as stored:
            return JSONResponse(page_of(stored["input"], request.query_params, default_limit=20))

    @asynccontextmanager
    async def _stored(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        caller = caller_of(self._worker, request)
        with self._worker.in_flight_limit.enter(caller.account) as slot:
            yield await stored_response(self._worker, caller, request.path_params["id"], None, slot)


async def stored_response(
    worker: Worker, caller: Caller, response_id: str, param: str | None, slot: InFlightSlot
) -> dict[str, Any]:
    """Return the stored `input` and `response`, counted in `slot`.

    Raises `PagemillError` 404 if the caller has none with this id, 429 or 503 beyond the limits.
    """
    if worker.config.stored_responses is None:
        raise not_stored(param)
    value = await worker.control.kept_response(caller.account, response_id) if _is_response(response_id) else None
    if value is None:
        raise response_not_found(response_id, param)
    slot.hold(parsed_bytes(value))
    found: dict[str, Any] = orjson.loads(value)
    if found["response"].get("background") and await was_cancelled(worker, caller, response_id):
        found["response"]["status"] = "cancelled"
    return found


def _is_response(key: str) -> bool:
    """Whether a key of the store is that of a response, not of a conversation or a cancellation."""
    return not key.startswith((PREFIX, CANCELLED))


def _too_large(num_bytes: int) -> None:
    logger.warning("a response of %d bytes is not stored: stored_responses.max_response_bytes", num_bytes)


def response_not_found(response_id: str, param: str | None) -> PagemillError:
    what, code = ("Previous response", "previous_response_not_found") if param else ("Response", "response_not_found")
    return PagemillError(f"{what} with id '{response_id[:80]}' not found.", status=404, param=param, code=code)


def continued(raw: bytes) -> tuple[str | None, str | None]:
    """Return the ids of the previous response and of the conversation; `None` for one that is missing or invalid, which
    is reported later."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None, None
    if not isinstance(body, dict):
        return None, None
    conversation = body.get("conversation")
    conversation = conversation.get("id") if isinstance(conversation, dict) else conversation
    previous, found = (
        each if isinstance(each, str) and each else None for each in (body.get("previous_response_id"), conversation)
    )
    return previous, found


def _whole_response(data: bytes) -> bytes | None:
    """Return the response in a whole answer or in a stream's last event; `None` for other parts of a stream."""
    if data.startswith(b"{"):
        return data
    last = data.rstrip(b"\n").rpartition(b"\n\n")[2]
    if not last.startswith(LAST_EVENTS):
        return None
    event = orjson.loads(last.partition(b"data: ")[2])
    return orjson.dumps(event["response"])

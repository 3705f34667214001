"""The routes `/v1/conversations`: lists of items that responses continue and extend, beside stored responses.

A conversation is one stored value, with the limits of a response. It belongs to an account, like responses. Requests to
one conversation follow each other: of two at the same time, the items of the later one stay.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagemill_api.dialects.openai_responses.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_gateway.routes.body import parsed_bytes, read_counted
from pagemill_gateway.routes.entry import caller_of, entered
from pagemill_gateway.routes.listing import page_of
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, body_too_large
from pagemill_protocol.ids import new_id
from pagemill_servers.keys.caller import Caller
from pagemill_servers.request_middleware import check_json_content_type

PATH = "/v1/conversations"
PREFIX = "conv_"
Item = dict[str, Any]
Body = TypeVar("Body")


class StoredConversation(NamedTuple):
    shown: dict[str, Any]
    """The conversation as clients see it."""
    items: list[Item]

    @property
    def id(self) -> str:
        return str(self.shown["id"])


class StoredConversations:
    """The conversations of all accounts."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def read(
        self, caller: Caller, conversation_id: str, slot: InFlightSlot, param: str | None
    ) -> StoredConversation:
        """Return a conversation, counted in `slot`. Raises `PagemillError` 404, 429 or 503."""
        self._config()
        value = None
        if conversation_id.startswith(PREFIX):
            value = await self._worker.control.kept_response(caller.account, conversation_id)
        if value is None:
            raise _not_found("Conversation", conversation_id, param)
        slot.hold(parsed_bytes(value))
        return StoredConversation(*orjson.loads(value))

    async def keep(self, caller: Caller, conversation: StoredConversation) -> None:
        """Store a conversation. Raises `PagemillError` 413 for one that is too large."""
        value = orjson.dumps(list(conversation))
        if len(value) > self._config().max_response_bytes:
            raise body_too_large(self._config().max_response_bytes)
        await self._worker.control.keep_response(caller.account, conversation.id, value)

    async def extend(self, caller: Caller, conversation: StoredConversation, items: Sequence[Item]) -> list[Item]:
        """Add items to a conversation; return them as they are listed. Raises `PagemillError` 413."""
        new = [listed(item, new_id()) for item in items]
        await self.keep(caller, conversation._replace(items=[*conversation.items, *new]))
        return new

    async def forget(self, caller: Caller, conversation_id: str) -> None:
        """Delete a conversation. Raises `PagemillError` 404."""
        self._config()
        there = conversation_id.startswith(PREFIX)
        if not there or not await self._worker.control.forget_response(caller.account, conversation_id):
            raise _not_found("Conversation", conversation_id, None)

    def _config(self) -> StoredResponsesConfig:
        if self._worker.config.stored_responses is None:
            raise not_stored(None)
        return self._worker.config.stored_responses


class ConversationRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._conversations = StoredConversations(worker)

    async def create(self, request: Request) -> Response:
        async with self._entered(request, ConversationRequest.read) as (caller, _, body):
            shown = {"id": f"{PREFIX}{new_id()}", "object": "conversation", "created_at": int(time.time())}
            conversation = StoredConversation({**shown, "metadata": body.metadata}, [])
            await self._conversations.extend(caller, conversation, body.items)
            return JSONResponse(conversation.shown)

    async def get(self, request: Request) -> Response:
        async with self._stored(request) as (_, conversation):
            return JSONResponse(conversation.shown)

    async def update(self, request: Request) -> Response:
        async with self._entered(request, MetadataRequest.read) as (caller, slot, body):
            found = await self._conversations.read(caller, request.path_params["id"], slot, None)
            changed = found._replace(shown={**found.shown, "metadata": body.metadata})
            await self._conversations.keep(caller, changed)
            return JSONResponse(changed.shown)

    async def delete(self, request: Request) -> Response:
        conversation_id = request.path_params["id"]
        await self._conversations.forget(caller_of(self._worker, request), conversation_id)
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        async with self._stored(request) as (_, conversation):
            return JSONResponse(page_of(conversation.items, request.query_params, default_limit=20))

    async def add_items(self, request: Request) -> Response:
        async with self._entered(request, ItemsRequest.read) as (caller, slot, body):
            found = await self._conversations.read(caller, request.path_params["id"], slot, None)
            new = await self._conversations.extend(caller, found, body.items)
            most = max(1, len(new))
            return JSONResponse(page_of(new, {"order": "asc"}, default_limit=most, max_limit=most))

    async def get_item(self, request: Request) -> Response:
        async with self._stored(request) as (_, conversation):
            return JSONResponse(conversation.items[_place(conversation, request.path_params["item"])])

    async def delete_item(self, request: Request) -> Response:
        async with self._stored(request) as (caller, conversation):
            del conversation.items[_place(conversation, request.path_params["item"])]
            await self._conversations.keep(caller, conversation)
            return JSONResponse(conversation.shown)

    @asynccontextmanager
    async def _stored(self, request: Request) -> AsyncIterator[tuple[Caller, StoredConversation]]:
        caller = caller_of(self._worker, request)
        with self._worker.in_flight_limit.enter(caller.account) as slot:
            yield caller, await self._conversations.read(caller, request.path_params["id"], slot, None)

    @asynccontextmanager
    async def _entered(
        self, request: Request, read: Callable[[bytes], Body]
    ) -> AsyncIterator[tuple[Caller, InFlightSlot, Body]]:
        caller = caller_of(self._worker, request)
        if self._worker.config.stored_responses is None:
            raise not_stored(None)
        check_json_content_type(request.scope)
        with entered(self._worker, caller, is_limited=False) as entry:
            raw = await read_counted(request.scope, request.receive, entry.slot, self._worker.config.max_body_bytes)
            yield caller, entry.slot, await self._worker.preparation.parse(raw, read)


def listed(item: Item, number: str) -> Item:
    """Return an item in its listed form: with id and type, and with text as a part."""
    kind = item.get("type", "message")
    shown = {"id": f"msg_{number}" if kind == "message" else f"item_{number}", **item, "type": kind}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": content}]
    return shown


def not_stored(param: str | None) -> PagemillError:
    return PagemillError(
        "This gateway does not store responses: its setting `stored_responses` is not set.",
        status=404,
        param=param,
        code="responses_not_stored",
    )


def _place(conversation: StoredConversation, item_id: str) -> int:
    for place, item in enumerate(conversation.items):
        if item["id"] == item_id:
            return place
    raise _not_found("Item", item_id, None)


def _not_found(what: str, found_id: str, param: str | None) -> PagemillError:
    return PagemillError(
        f"{what} with id '{found_id[:80]}' not found.", status=404, param=param, code=f"{what.lower()}_not_found"
    )

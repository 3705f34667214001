"""The routes `/v1/responses` of a gateway that stores responses: continue, show and delete a response.

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
from pagemill_gateway.admission.in_flight_limit import InFlightSlot
from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.routes.body import parsed_bytes
from pagemill_gateway.routes.client import ClientResponse
from pagemill_gateway.routes.entry import EnteredRequest, caller_of
from pagemill_gateway.routes.generate import GenerateRoute
from pagemill_gateway.routes.listing import page_of
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError
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

    async def _dialect_for(self, raw: bytes, entry: EnteredRequest, client: ClientResponse) -> Dialect:
        before = await self._before(raw, entry)
        dialect = StoredResponsesDialect(before)

        async def keep(data: bytes) -> None:
            body = _whole_response(data) if dialect.stores else None
            if body is not None:
                await self._keep(entry.caller, body, dialect.input)

        client.on_answer, client.max_seen_bytes = keep, self._config.max_response_bytes
        return dialect

    async def _before(self, raw: bytes, entry: EnteredRequest) -> list[dict[str, Any]]:
        if b"previous_response_id" not in raw:
            return []
        previous = await self._worker.preparation.parse(raw, _previous_id)
        if previous is None:
            return []
        kept = await stored_response(self._worker, entry.caller, previous, "previous_response_id", entry.slot)
        items: list[dict[str, Any]] = [*kept["input"], *kept["response"]["output"]]
        return items

    async def _keep(self, caller: Caller, body: bytes, items: list[dict[str, Any]]) -> None:
        if len(body) > self._config.max_response_bytes:
            _too_large(len(body))
            return
        response = orjson.loads(body)
        response_id: str = response["id"]
        shown = [_shown(item, f"{response_id.removeprefix('resp_')}_{index}") for index, item in enumerate(items)]
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
            return JSONResponse(stored["response"])

    async def delete(self, request: Request) -> Response:
        caller, response_id = caller_of(self._worker, request), request.path_params["id"]
        if not await self._worker.control.forget_response(caller.account, response_id):
            raise _not_found(response_id, None)
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
        raise PagemillError(
            "This gateway does not store responses: its setting `stored_responses` is not set.",
            status=404,
            param=param,
            code="responses_not_stored",
        )
    value = await worker.control.kept_response(caller.account, response_id)
    if value is None:
        raise _not_found(response_id, param)
    slot.hold(parsed_bytes(value))
    found: dict[str, Any] = orjson.loads(value)
    return found


def _too_large(num_bytes: int) -> None:
    logger.warning("a response of %d bytes is not stored: stored_responses.max_response_bytes", num_bytes)


def _not_found(response_id: str, param: str | None) -> PagemillError:
    what, code = ("Previous response", "previous_response_not_found") if param else ("Response", "response_not_found")
    return PagemillError(f"{what} with id '{response_id[:80]}' not found.", status=404, param=param, code=code)


def _previous_id(raw: bytes) -> str | None:
    """Return the body's `previous_response_id`; `None` if it has none or is invalid, which is reported later."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    value = body.get("previous_response_id") if isinstance(body, dict) else None
    return value if isinstance(value, str) else None


def _whole_response(data: bytes) -> bytes | None:
    """Return the response in a whole answer or in a stream's last event; `None` for other parts of a stream."""
    if data.startswith(b"{"):
        return data
    last = data.rstrip(b"\n").rpartition(b"\n\n")[2]
    if not last.startswith(LAST_EVENTS):
        return None
    event = orjson.loads(last.partition(b"data: ")[2])
    return orjson.dumps(event["response"])


def _shown(item: dict[str, Any], number: str) -> dict[str, Any]:
    """Return an input item in its listed form: with id and type, and with text as a part."""
    kind = item.get("type", "message")
    shown = {"id": f"msg_{number}" if kind == "message" else f"item_{number}", **item, "type": kind}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": content}]
    return shown

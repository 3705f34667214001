"""Responses in the background: `POST /v1/responses` with `background: true` is answered at once, and the response is
generated without a client. It is read by its id until it is complete, and can be cancelled.

The state is in the store alone, so that any worker shows and cancels it. The worker that generates it says there that
it still does; a response of which no worker says so has failed. A cancellation is an entry of its own, which the worker
looks for and cannot overwrite.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from pagemill_gateway.inner_client import InnerClient
from pagemill_gateway.routes.stored.conversations import listed
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.ids import new_id
from pagemill_servers.keys.caller import Caller

logger = logging.getLogger("pagemill.gateway.responses")

POLL_S = 0.5
"""How often the store is asked whether a response was cancelled."""
TOUCH_S = 5.0
LOST_S = 20.0
"""A response that no worker has touched for so long is not generated any more."""
RUNNING = ("queued", "in_progress")
CANCELLED = "cancelled_"
"""Begins the key of a cancellation, before the id of its response."""
Stored = dict[str, Any]


class BackgroundResponses:
    """The responses that this worker generates without a client."""

    def __init__(self, worker: Worker, app: ASGIApp, path: str, max_bytes: int) -> None:
        """`app` answers requests to `path` as live ones, with the access log. `max_bytes`: of a response."""
        self._worker = worker
        self._app = app
        self._path = path
        self._max_bytes = max_bytes

    async def begin(self, raw: bytes, caller: Caller, shown: dict[str, Any], items: list[dict[str, Any]]) -> Any:
        """Keep the queued response and begin to generate it; return it.

        `raw`: the checked body. `shown`: its fields that a response repeats. `items`: all items of its input.
        """
        given = orjson.loads(raw)
        key = new_id()
        response = {
            "id": f"resp_{key}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued",
            "model": given["model"],
            "output": [],
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "usage": None,
            **shown,
            "background": True,
            "store": True,
        }
        shown_items = [listed(item, f"{key}_{index}") for index, item in enumerate(items)]
        stored: Stored = {"input": shown_items, "response": response}
        await self._keep(caller, stored)
        body = orjson.dumps({**given, "background": False, "stream": False, "store": False})
        task = asyncio.create_task(self._run(caller, stored, body))
        self._worker.background.add(task)
        task.add_done_callback(self._worker.background.discard)
        return response

    async def _run(self, caller: Caller, stored: Stored, body: bytes) -> None:
        response = stored["response"]
        client = _Client(body, self._max_bytes)
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "headers": [(b"content-type", b"application/json")],
            "state": {"request_id": response["id"].removeprefix("resp_"), "caller": caller},
        }
        call = asyncio.ensure_future(self._app(scope, client.receive, client.send))
        try:
            response["status"] = "in_progress"
            if await self._wait(caller, stored, call):
                client.leave()
                await asyncio.wait({call})
                return
            call.result()
            stored["response"] = client.response(response)
        except PagemillError as error:
            stored["response"] = _failed(response, error.code or error.type, error.message)
        except asyncio.CancelledError:
            call.cancel()
            stored["response"] = _failed(response, "server_error", "The gateway that generated the response ended.")
            await self._keep(caller, stored)
            raise
        except Exception:
            logger.exception("the response %s in the background failed", response["id"])
            stored["response"] = _failed(response, "server_error", "The response failed.")
        if not await self._is_cancelled(caller, response["id"]):
            await self._keep(caller, stored)

    async def _wait(self, caller: Caller, stored: Stored, call: asyncio.Future[None]) -> bool:
        """Wait until the answer is there, and say so in the store. Return whether it was cancelled before."""
        touched_at = -TOUCH_S
        while True:
            if time.monotonic() - touched_at >= TOUCH_S:
                await self._keep(caller, stored)
                touched_at = time.monotonic()
            done, _ = await asyncio.wait({call}, timeout=POLL_S)
            if done:
                return False
            if await self._is_cancelled(caller, stored["response"]["id"]):
                return True

    async def _is_cancelled(self, caller: Caller, response_id: str) -> bool:
        """Whether it was cancelled or deleted."""
        is_there = await self._worker.control.kept_response(caller.account, response_id) is not None
        return not is_there or await was_cancelled(self._worker, caller, response_id)

    async def _keep(self, caller: Caller, stored: Stored) -> None:
        value = orjson.dumps({**stored, "touched_unix_s": time.time()})
        await self._worker.control.keep_response(caller.account, stored["response"]["id"], value)


def check_background(given: dict[str, Any], caller: Caller) -> None:
    """Refuse what does not go with `background: true`. Raises `PagemillError` 400."""
    if caller.is_batch:
        raise invalid_field(
            "background", "`background` does not go with a batch, which is in the background. Remove it."
        )
    if given.get("stream"):
        raise invalid_field(
            "stream", "`stream` does not go with `background`. Remove it, and read the response by its id."
        )
    if given.get("store") is False:
        raise invalid_field(
            "store", "`store: false` does not go with `background`: the response is read from the store."
        )


def shown_response(stored: Stored) -> dict[str, Any]:
    """Return a stored response; one that no worker generates any more has failed."""
    response: dict[str, Any] = stored["response"]
    if response.get("status") in RUNNING and time.time() - stored.get("touched_unix_s", 0.0) > LOST_S:
        return _failed(
            response, "server_error", "The gateway that generated the response ended. Send the request again."
        )
    return response


async def was_cancelled(worker: Worker, caller: Caller, response_id: str) -> bool:
    return await worker.control.kept_response(caller.account, CANCELLED + response_id) is not None


async def cancel(worker: Worker, caller: Caller, stored: Stored) -> dict[str, Any]:
    """Cancel a stored response that is not complete; return it. Raises `PagemillError` 400 for one that no client
    left."""
    response: dict[str, Any] = stored["response"]
    if not response.get("background"):
        raise PagemillError("Only responses with `background` can be cancelled.", code="invalid_value")
    if response["status"] not in RUNNING:
        return response
    await worker.control.keep_response(caller.account, CANCELLED + response["id"], b"{}")
    return {**response, "status": "cancelled"}


def _failed(response: dict[str, Any], code: str, message: str) -> dict[str, Any]:
    return {**response, "status": "failed", "error": {"code": code, "message": message}}


class _Client(InnerClient):
    """A client that keeps the answer."""

    def __init__(self, body: bytes, max_bytes: int) -> None:
        super().__init__(body)
        self._max_bytes = max_bytes
        self._status = 500
        self._answer = bytearray()

    def response(self, begun: dict[str, Any]) -> dict[str, Any]:
        """Return the complete response, with the id that its client got."""
        if self.has_left:
            return _failed(begun, "server_error", "The response is larger than stored_responses.max_response_bytes.")
        found = orjson.loads(self._answer)
        if self._status != 200:
            error = found["error"]
            return _failed(begun, error.get("code") or error["type"], error["message"])
        return {**found, "id": begun["id"], "created_at": begun["created_at"], "background": True, "store": True}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif not self.has_left:
            self._answer += message.get("body", b"")
            if len(self._answer) > self._max_bytes:
                self.leave()

"""The routes `/v1/files` and `/v1/batches` of OpenAI's API, and `/v1/messages/batches` of Anthropic's.

Without the setting `batches` they return an error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pagemill_api.dialects.anthropic import listing, message_batches
from pagemill_api.dialects.anthropic.message_batches import MessageBatchRequest
from pagemill_api.openai.batches import BatchRequest
from pagemill_api.openai.parse import parse_body
from pagemill_gateway.batches.objects import FINAL, Batch, BatchFile
from pagemill_gateway.batches.service import Batches, Upload
from pagemill_gateway.routes.body import read_counted
from pagemill_gateway.routes.entry import caller_of, entered
from pagemill_gateway.routes.listing import page_of
from pagemill_gateway.routes.multipart import read_form
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, invalid_field, show
from pagemill_servers.keys.caller import Caller
from pagemill_servers.request_middleware import check_json_content_type

FILES, BATCHES = "/v1/files", "/v1/batches"
MAX_FILES_PAGE = 10_000
UPLOADS_AT_ONCE = 2
"""Uploads of which a piece is parsed and written at the same time."""
MAX_RESULT_BYTES = 64 * 1024 * 1024
MAX_FAULT_BYTES = 16 * 1024
"""Enough for a line of an error file without an answer."""


class _Stored:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def _enter(self, request: Request) -> tuple[Caller, Batches]:
        caller = caller_of(self._worker, request)
        if self._worker.batches is None:
            raise PagemillError(
                "This gateway takes no files and batches: its setting `batches` is not set.",
                status=404,
                code="batches_not_configured",
            )
        return caller, self._worker.batches


class BatchRoutes(_Stored):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._upload_turns = asyncio.Semaphore(UPLOADS_AT_ONCE)

    async def upload(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        with entered(self._worker, caller, is_limited=False):
            upload = await batches.upload(caller.account)
            try:
                form = await read_form(request.scope, request.receive, upload.append, self._upload_turns)
                if form.filename is None:
                    raise invalid_field("file", "The form has no field `file`.", code="missing_required_parameter")
                if (purpose := form.fields.get("purpose")) != "batch":
                    raise invalid_field("purpose", f"`purpose` must be batch, got {show(str(purpose))}.")
                file = await upload.done(form.filename, purpose)
            except BaseException:
                await upload.discard()
                raise
        return JSONResponse(file.shown())

    async def list_files(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        purpose = request.query_params.get("purpose")
        files = [each.shown() for each in await batches.files(caller.account) if purpose in (None, each.purpose)]
        return _page(files, request, default_limit=MAX_FILES_PAGE, max_limit=MAX_FILES_PAGE)

    async def get_file(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        return JSONResponse((await batches.file(caller.account, request.path_params["id"])).shown())

    async def content(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        file = await batches.file(caller.account, request.path_params["id"])
        headers = {"content-length": str(file.bytes)}
        return StreamingResponse(batches.content(file), headers=headers, media_type="application/octet-stream")

    async def delete_file(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        file_id = request.path_params["id"]
        await batches.delete_file(caller.account, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        check_json_content_type(request.scope)
        with entered(self._worker, caller, is_limited=False) as entry:
            raw = await read_counted(request.scope, request.receive, entry.slot, self._worker.config.max_body_bytes)
            body = await self._worker.preparation.parse(raw, lambda raw: parse_body(raw, BatchRequest))
            batch = await batches.create(caller, body)
        if self._worker.batch_runner is not None:
            self._worker.batch_runner.wake()
        return JSONResponse(batch.shown())

    async def list(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        return _page([each.shown() for each in await batches.batches(caller.account)], request, default_limit=20)

    async def get(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        return JSONResponse((await batches.batch(caller.account, request.path_params["id"])).shown())

    async def cancel(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        batch = await batches.cancel(caller.account, request.path_params["id"])
        if self._worker.batch_runner is not None:
            self._worker.batch_runner.cancelled(batch.id)
        return JSONResponse(batch.shown())


class MessageBatchRoutes(_Stored):
    """Anthropic's batches, which are batches of `/v1/messages` with a file that the gateway writes."""

    async def create(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        check_json_content_type(request.scope)
        with entered(self._worker, caller, is_limited=False) as entry:
            raw = await read_counted(request.scope, request.receive, entry.slot, self._worker.config.max_body_bytes)
            body = await self._worker.preparation.parse(raw, lambda raw: parse_body(raw, MessageBatchRequest))
            file = await self._written(body, await batches.upload(caller.account))
            given = BatchRequest(
                input_file_id=file.id,
                endpoint=message_batches.ENDPOINT,
                completion_window=message_batches.WINDOW,
                metadata={message_batches.NUM_REQUESTS: str(len(body.requests))},
            )
            try:
                batch = await batches.create(caller, given)
            except BaseException:
                await batches.delete_file(caller.account, file.id)
                raise
        if self._worker.batch_runner is not None:
            self._worker.batch_runner.wake()
        return JSONResponse(message_batches.shown(batch.shown(), {}, _origin(request)))

    async def list(self, request: Request) -> Response:
        caller, batches = self._enter(request)
        own = [each for each in await batches.batches(caller.account) if each.endpoint == message_batches.ENDPOINT]
        by_id = {message_batches.client_id(each.id): each for each in reversed(own)}
        page = listing.page_of([{"id": batch_id} for batch_id in by_id], request.query_params)
        page["data"] = [await self._shown(request, batches, by_id[each["id"]]) for each in page["data"]]
        return JSONResponse(page)

    async def get(self, request: Request) -> Response:
        _, batches, batch = await self._found(request)
        return JSONResponse(await self._shown(request, batches, batch))

    async def cancel(self, request: Request) -> Response:
        caller, batches, batch = await self._found(request)
        batch = await batches.cancel(caller.account, batch.id)
        if self._worker.batch_runner is not None:
            self._worker.batch_runner.cancelled(batch.id)
        return JSONResponse(await self._shown(request, batches, batch))

    async def delete(self, request: Request) -> Response:
        caller, batches, batch = await self._found(request)
        await batches.delete(caller.account, batch)
        return JSONResponse({"id": message_batches.client_id(batch.id), "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        _, batches, batch = await self._found(request)
        if batch.status not in FINAL:
            raise invalid_field("id", f"The batch is {batch.status}: it has no results yet. Wait for its end.")

        async def lines() -> AsyncIterator[bytes]:
            async for line in batches.result_lines(batch, MAX_RESULT_BYTES):
                yield message_batches.result_of(line)

        return StreamingResponse(lines(), media_type="application/x-jsonl")

    async def _found(self, request: Request) -> tuple[Caller, Batches, Batch]:
        caller, batches = self._enter(request)
        batch_id = request.path_params["id"]
        try:
            batch = await batches.batch(caller.account, message_batches.own_id(batch_id))
        except PagemillError as error:
            error.message = error.message if error.status != 404 else f"No such batch: {show(batch_id)}."
            raise
        return caller, batches, batch

    async def _shown(self, request: Request, batches: Batches, batch: Batch) -> dict[str, Any]:
        """Return the batch; lines that were not run are only in the error file of one that ended early."""
        endings: Counter[str] = Counter()
        if batch.status in ("cancelled", "expired"):
            async for line in batches.result_lines(batch, MAX_FAULT_BYTES, only_errors=True):
                if ending := message_batches.ending_of(line):
                    endings[ending] += 1
        return message_batches.shown(batch.shown(), endings, _origin(request))

    async def _written(self, body: MessageBatchRequest, upload: Upload) -> BatchFile:
        try:
            for line in body.lines():
                await upload.append(line)
            return await upload.done("messages.jsonl", "batch")
        except BaseException:
            await upload.discard()
            raise


def _origin(request: Request) -> str:
    """Return scheme and host as the client sees them; a proxy that ends TLS says so in `x-forwarded-proto`."""
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    return f"{scheme}://{request.url.netloc}"


def _page(items: list[dict[str, Any]], request: Request, *, default_limit: int, max_limit: int = 100) -> Response:
    return JSONResponse(page_of(items, request.query_params, default_limit=default_limit, max_limit=max_limit))

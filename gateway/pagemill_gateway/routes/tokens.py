"""The routes that count tokens, and `POST /detokenize`, which the gateway answers with the model's tokenizer.

They count as requests for a key's limits, and their tokens like those of a prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from pagemill_api.dialects.token_counts import TokenCount
from pagemill_api.openai import prepare, render
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import DetokenizeRequest
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_gateway.limits.limiter import charges_of
from pagemill_gateway.limits.refusals import check_model, visible_to
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.routes.access import record_of
from pagemill_gateway.routes.body import read_counted
from pagemill_gateway.routes.connection import run_while_connected
from pagemill_gateway.routes.entry import EnteredRequest, caller_of, entered
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, client_closed_request, invalid_field
from pagemill_routing.brain.interface import Target
from pagemill_servers.direct import direct_response
from pagemill_servers.keys.caller import Caller
from pagemill_servers.request_middleware import check_json_content_type, error_response

CHARS_PER_TOKEN = 4
"""The assumed characters per token, for the reservation before a text is tokenized."""


class TokenRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def count_route(self, count: TokenCount) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that counts the tokens of a prompt."""
        return partial(self._tokenize, count)

    async def _tokenize(self, count: TokenCount, request: Request) -> Response:
        caller, record = self._caller(request), record_of(request.scope)
        with entered(self._worker, caller) as entry:
            slot = entry.slot
            body = await self._worker.preparation.parse(await self._read(request, slot), count.parse)
            target = await self._resolve(body.model, caller, record)

            def answer(tokenizer: Tokenizer) -> tuple[int, bytes]:
                parsers = self._worker.preparation.parsers(target, tokenizer)
                token_ids = prepare.tokenize(body, tokenizer, target.max_model_len, parsers)
                texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
                return len(token_ids), count.body(token_ids, target.max_model_len, texts)

            expected_tokens = body.num_chars // CHARS_PER_TOKEN + 1
            return await _while_connected(request, self._counted(entry, expected_tokens, target, answer, record))

    async def detokenize(self, request: Request) -> Response:
        caller, record = self._caller(request), record_of(request.scope)
        with entered(self._worker, caller) as entry:
            slot = entry.slot
            body = await self._worker.preparation.parse(
                await self._read(request, slot), lambda raw: parse_body(raw, DetokenizeRequest)
            )
            target = await self._resolve(body.model, caller, record)

            def answer(tokenizer: Tokenizer) -> tuple[int, bytes]:
                text = prepare.detokenize(body, tokenizer, target.max_model_len)
                return len(body.tokens), render.detokenize_body(text)

            return await _while_connected(request, self._counted(entry, len(body.tokens), target, answer, record))

    def _caller(self, request: Request) -> Caller:
        """Authenticate the caller. Raises `PagemillError` before the body is read."""
        caller = caller_of(self._worker, request)
        check_json_content_type(request.scope)
        return caller

    async def _counted(
        self,
        entry: EnteredRequest,
        expected_tokens: int,
        target: Target,
        answer: Callable[[Tokenizer], tuple[int, bytes]],
        record: RequestRecord,
    ) -> Response:
        """Return the response, counted for the caller's limits, with the rate-limit headers, also for an error.

        `answer` returns the number of tokens and the body.
        """
        preparation = self._worker.preparation
        charges = charges_of(entry.caller, target, record.asked_model)
        num_tokens = min(expected_tokens, target.max_model_len or expected_tokens)
        async with self._worker.limiter.request(entry.caller, charges, num_tokens) as counted:
            entry.arrival.over()
            try:
                tokenizer = await preparation.tokenizer(target)
                work = partial(answer, tokenizer)
                counted.num_tokens, raw = await preparation.in_thread(work, entry.slot.num_bytes, tokenizer)
                response = Response(raw, media_type="application/json")
            except PagemillError as error:
                record.failed(error)
                response = error_response(error)
        response.headers.update(counted.headers)
        return response

    async def _read(self, request: Request, slot: InFlightSlot) -> bytes:
        return await read_counted(request.scope, request.receive, slot, self._worker.config.max_body_bytes)

    async def _resolve(self, model: str, caller: Caller, record: RequestRecord) -> Target:
        """Return the target of the named model, or of the only model that the caller may use."""
        served = {each.model for each in await self._worker.brain.names()}
        served = {name for name in served if caller.may_use(name)}
        if model:
            check_model(caller, model)
        if not model and len(served) != 1:
            raise invalid_field("model", f"`model` is required here: {len(served)} models are served. Name one.")
        record.asked_model = model
        try:
            target = await self._worker.brain.look_up(model or next(iter(served)))
            record.model, record.deployment = target.model, target.deployment
            return target
        except PagemillError as error:
            raise visible_to(caller, error, model) from error


async def _while_connected(request: Request, answering: Awaitable[Response]) -> Response:
    """Return the response. Raises `PagemillError` 499, and cancels what has not begun, when the client disconnects."""
    responses: list[Response] = []

    async def answer() -> None:
        responses.append(await answering)

    if not await run_while_connected(answer(), request.receive, direct_response(request.scope)):
        raise client_closed_request()
    return responses[0]

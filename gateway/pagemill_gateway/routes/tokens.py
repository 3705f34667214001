"""`POST /tokenize` and `/detokenize`, answered by the gateway itself with the model's tokenizer.

To a key's limits they are requests that cost no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from pagemill_gateway.admission.gate import GateSlot
from pagemill_gateway.brain.interface import Target
from pagemill_gateway.limits.refusals import check_model, told_to
from pagemill_gateway.routes.access import record_of
from pagemill_gateway.routes.body import read_counted
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.http.door import check_json_content_type, error_response
from pagemill_protocol.keys.caller import Caller
from pagemill_protocol.openai import prepare, render
from pagemill_protocol.openai.schemas import DetokenizeRequest, TokenizeRequest


class TokenRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def tokenize(self, request: Request) -> Response:
        caller = self._enter(request)
        with self._worker.gate.enter() as place:
            body = await self._worker.preparation.parse(await self._read(request, place), TokenizeRequest)
            target = await self._resolve(body.model, caller)

            async def answer() -> bytes:
                tokenizer = await self._worker.preparation.tokenizer(target)
                token_ids = await asyncio.to_thread(prepare.tokenize, body, tokenizer)
                texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
                return render.tokenize_body(token_ids, target.max_model_len, texts)

            return await self._counted(caller, answer)

    async def detokenize(self, request: Request) -> Response:
        caller = self._enter(request)
        with self._worker.gate.enter() as place:
            body = await self._worker.preparation.parse(await self._read(request, place), DetokenizeRequest)
            target = await self._resolve(body.model, caller)

            async def answer() -> bytes:
                tokenizer = await self._worker.preparation.tokenizer(target)
                return render.detokenize_body(await asyncio.to_thread(prepare.detokenize, body, tokenizer))

            return await self._counted(caller, answer)

    def _enter(self, request: Request) -> Caller:
        """Who calls. Raises `PagemillError`, before the body is read, for those who get nothing anyway."""
        caller = self._worker.keys.authenticate(request.scope)
        record_of(request.scope).tenant = caller.tenant
        check_json_content_type(request.scope)
        self._worker.limiter.check(caller)
        return caller

    async def _counted(self, caller: Caller, answer: Callable[[], Awaitable[bytes]]) -> Response:
        """The answer as one of the caller's requests; whatever it is, it says what is left of them."""
        async with self._worker.limiter.request(caller) as headers:
            try:
                response = Response(await answer(), media_type="application/json")
            except PagemillError as error:
                response = error_response(error)
        response.headers.update(headers)
        return response

    async def _read(self, request: Request, place: GateSlot) -> bytes:
        return await read_counted(request.scope, request.receive, place, self._worker.config.max_body_bytes)

    async def _resolve(self, model: str, caller: Caller) -> Target:
        """The named model, or the only one there is for `caller`."""
        served = {each.model for each in await self._worker.brain.names()}
        served = {name for name in served if caller.may_use(name)}
        if model:
            check_model(caller, model)
        if not model and len(served) != 1:
            raise invalid_field("model", f"`model` is required here: {len(served)} models are served. Name one.")
        try:
            return await self._worker.brain.look_up(model or next(iter(served)))
        except PagemillError as error:
            raise told_to(caller, error, model) from error

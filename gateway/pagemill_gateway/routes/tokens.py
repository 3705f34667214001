"""`POST /tokenize` and `/detokenize`, answered by the gateway itself with the model's tokenizer."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from pagemill_gateway.admission.gate import Place
from pagemill_gateway.brain.interface import Target
from pagemill_gateway.limits.caller import Caller
from pagemill_gateway.limits.refusals import check_model, told_to
from pagemill_gateway.routes.body import read_counted
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.http.door import check_json_content_type
from pagemill_protocol.openai import prepare, render
from pagemill_protocol.openai.schemas import DetokenizeRequest, TokenizeRequest


class TokenRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def tokenize(self, request: Request) -> Response:
        caller = self._worker.keys.authenticate(request.scope)
        check_json_content_type(request.scope)
        with self._worker.gate.enter() as place:
            body = await self._worker.preparation.parse(await self._read(request, place), TokenizeRequest)
            target = await self._resolve(body.model, caller)
            tokenizer = await self._worker.preparation.tokenizer(target)
            token_ids = await asyncio.to_thread(prepare.tokenize, body, tokenizer)
            texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
            return _json(render.tokenize_body(token_ids, target.max_model_len, texts))

    async def detokenize(self, request: Request) -> Response:
        caller = self._worker.keys.authenticate(request.scope)
        check_json_content_type(request.scope)
        with self._worker.gate.enter() as place:
            body = await self._worker.preparation.parse(await self._read(request, place), DetokenizeRequest)
            tokenizer = await self._worker.preparation.tokenizer(await self._resolve(body.model, caller))
            text = await asyncio.to_thread(prepare.detokenize, body, tokenizer)
            return _json(render.detokenize_body(text))

    async def _read(self, request: Request, place: Place) -> bytes:
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


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")

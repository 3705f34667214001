"""What gateways and the operator call: generate, the state stream, the tokenizer bundle, drain.

All ask for the internal token, or for a loopback peer when none is configured. `/internal/generate` lives on the data
port, the others on the control port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.openai_routes import abort, submit
from pagemill_engine.server.responses import FramesResponse
from pagemill_engine.server.state_stream import StatePublisher
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.frames import MSGPACK_CONTENT_TYPE, STATE_CONTENT_TYPE
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.http.door import require_internal

BUNDLE_DIGEST_HEADER = "x-pagemill-digest"
_decoder = msgspec.msgpack.Decoder(GenerateRequest)


async def generate(request: Request) -> FramesResponse:
    """Take a prepared request, or refuse it with its status. From status 200 on, the engine owns it."""
    context = _guarded(request)
    generate_request = _decode(await request.body())
    answer = submit(context, [generate_request])
    return FramesResponse([generate_request], answer, lambda: abort(context, answer))


async def state(request: Request) -> StateResponse:
    context = _guarded(request)
    return StateResponse(context)


async def bundle(request: Request) -> Response:
    context = _guarded(request)
    tokenizer_bundle = context.loaded_tokenizer().bundle
    headers = {BUNDLE_DIGEST_HEADER: tokenizer_bundle.digest}
    return Response(tokenizer_bundle.to_bytes(), media_type=MSGPACK_CONTENT_TYPE, headers=headers)


async def drain(request: Request) -> Response:
    """Take no more requests; what runs goes on. The answer tells how many requests are left."""
    context = _guarded(request)
    context.drain()
    num_requests = context.client.num_requests if context.client is not None else 0
    return Response(orjson.dumps({"draining": True, "num_requests": num_requests}), media_type="application/json")


class StateResponse:
    """An endless stream of state frames, until the reader leaves or the server ends."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        publisher: StatePublisher = self._context.publisher
        subscription = publisher.subscribe()
        watcher = asyncio.create_task(_call_on_disconnect(receive, subscription.close))
        self._context.metrics.state_streams(+1)
        try:
            headers = [(b"content-type", STATE_CONTENT_TYPE.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for frame in subscription:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            publisher.unsubscribe(subscription)
            self._context.metrics.state_streams(-1)


def _guarded(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    require_internal(request.scope, context.tokens.accepted())
    return context


def _decode(raw: bytes) -> GenerateRequest:
    try:
        request = _decoder.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise PagemillError(f"The body is no GenerateRequest: {error}", code="invalid_request") from None
    if not request.request_id or len(request.request_id) > 256:
        raise invalid_field("request_id", "request_id must have 1 to 256 characters.")
    return request


async def _call_on_disconnect(receive: Receive, callback: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()

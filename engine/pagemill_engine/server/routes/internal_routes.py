"""Routes for gateways and the operator: link, state stream, tokenizer bundle, drain.

`/internal/link` is on the data port and checks the internal token itself. The others are on the control port, whose
guard (`pagemill_servers.guard`) checks it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_engine.server.routes.gateway_link import GatewayLink
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.frames import MSGPACK_CONTENT_TYPE, STATE_CONTENT_TYPE
from pagemill_protocol.link import LINK_PATH, LINK_PROTOCOL
from pagemill_protocol.report.state import GATEWAY_HEADER
from pagemill_protocol.versions import protocol_headers, require_protocol, stream_headers
from pagemill_servers.direct import TakeOver, upgrade_of
from pagemill_servers.guard import require_control
from pagemill_servers.request_middleware import header, read_body

MAX_WAIT_S = 60.0
GATEWAY = "The gateway"
BUNDLE_DIGEST_HEADER = "x-pagemill-digest"


async def link(request: Request) -> LinkResponse:
    """Turn the connection into a link, over which a gateway sends all its requests."""
    context = context_of(request)
    require_control(request.scope, context.tokens, context.settings.server.control_allowed_hosts)
    require_protocol(request.scope["headers"], GATEWAY)
    take_over = upgrade_of(request.scope)
    if take_over is None:
        raise PagemillError(
            f"Send this request with the headers `Connection: Upgrade` and `Upgrade: {LINK_PROTOCOL}`.",
            status=426,
            code="upgrade_required",
        )
    return LinkResponse(context, take_over)


async def state(request: Request) -> Response | StateResponse:
    context = context_of(request)
    if request.method == "HEAD":  # a stream without a body would keep the connection open for nothing
        return Response(headers={"content-type": STATE_CONTENT_TYPE, **protocol_headers()})
    require_protocol(request.scope["headers"], GATEWAY)
    # A body that never ends is refused here; once the stream has begun, only a disconnect can arrive.
    await read_body(request.receive)
    return StateResponse(context)


async def bundle(request: Request) -> Response:
    context = context_of(request)
    await read_body(request.receive)  # a client that is cut off within its body may lose the answer
    tokenizer_bundle = context.loaded_tokenizer().bundle
    headers = {BUNDLE_DIGEST_HEADER: tokenizer_bundle.digest}
    return Response(tokenizer_bundle.to_bytes(), media_type=MSGPACK_CONTENT_TYPE, headers=headers)


async def drain(request: Request) -> Response:
    """Become unready now. Answers when all gateways have acknowledged, or after `wait_s`; then requests are refused.

    Running requests continue; the answer says how many are left.
    """
    context = context_of(request)
    wait_s = seconds(request.query_params.get("wait_s", "0"), "wait_s")
    context.drain()
    await context.draining.settle(wait_s)
    gateways = context.draining.gateways
    body = {"draining": True, "num_requests": context.num_requests, **gateways._asdict()}
    return Response(orjson.dumps(body), media_type="application/json")


async def drained(request: Request) -> Response:
    """Record a gateway's acknowledgement that it sends no more requests here."""
    context = context_of(request)
    context.draining.acknowledge(_gateway_of(request.scope))
    return Response(status_code=204)


class LinkResponse:
    """Response that hands the connection over to a `GatewayLink`."""

    def __init__(self, context: ServerContext, take_over: TakeOver) -> None:
        self._context = context
        self._take_over = take_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._context.metrics.http_request(LINK_PATH, 101)
        self._take_over(GatewayLink(self._context, scope))


class StateResponse:
    """Endless stream of state frames, until the reader disconnects or the server ends."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        publisher: StatePublisher = self._context.publisher
        gateway = _gateway_of(scope)
        self._context.draining.reader_connected(gateway)
        subscription = publisher.subscribe()
        watcher = asyncio.create_task(_call_on_disconnect(receive, subscription.close))
        self._context.metrics.state_streams(+1)
        try:
            headers = stream_headers(STATE_CONTENT_TYPE)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for frame in subscription:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            publisher.unsubscribe(subscription)
            self._context.draining.reader_disconnected(gateway)
            self._context.metrics.state_streams(-1)


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def _gateway_of(scope: Scope) -> str:
    """Return the name of a state reader: the name that a gateway sends, or else its address."""
    name = header(scope, GATEWAY_HEADER)
    return name[:256] if name else f"address {(scope.get('client') or ('local', 0))[0]}"


def seconds(text: str, name: str) -> float:
    """Return a query parameter in seconds. Raises `PagemillError` 400."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise invalid_field(name, f"{name} must be a number of seconds from 0 to {MAX_WAIT_S:g}, got {text[:40]!r}.")
    return seconds


async def _call_on_disconnect(receive: Receive, callback: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()

"""The ASGI apps of the data port and the control port: route tables, middleware, and the routes of probes and metrics.

Live means that the loop makes progress: the engine process exists and reported recently (at least every second, also
when idle; one step of a large prompt may take long). Ready means that the model has generated a token since the start
and that no drain was requested. Load never makes a server unready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill_api.dialects.error_shapes import error_body_at
from pagemill_api.dialects.registry import LIVE_PATHS, PAGES, READY_PATHS, generating_routes
from pagemill_api.dialects.token_counts import TOKEN_COUNTS
from pagemill_api.openapi import OPENAPI_PATH, document
from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.metrics import VERSION
from pagemill_engine.server.routes import internal_routes, openai_routes, sleep_routes
from pagemill_engine.server.routes.keys import keyed
from pagemill_engine.server.routes.traces import TraceRequests
from pagemill_protocol.errors import ErrorBody
from pagemill_protocol.link import LINK_PATH
from pagemill_protocol.versions import PROTOCOL_VERSION
from pagemill_servers.auth import is_loopback_address
from pagemill_servers.cors import Cors
from pagemill_servers.docs_page import DOCS_PATH, docs_page
from pagemill_servers.errors import openai_shape, with_errors
from pagemill_servers.guard import ControlGuard, HostGuard
from pagemill_servers.home_page import HOME_PATH, home
from pagemill_servers.request_middleware import RequestMiddleware, install_error_handlers

MAX_SILENCE_S = 60.0
"""Silence of the engine process after which the server reports itself dead and is restarted."""


async def livez(request: Request) -> Response:
    fault = liveness_problem(request.app.state.context)
    return _report({"alive": fault is None, "detail": fault or "ok"}, fault is None)


async def readyz(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    return _report(context.lifecycle.report(), context.lifecycle.ready)


async def health(request: Request) -> Response:
    """Serve vLLM's `/health`: an empty body, and status 200 if a request would be served now."""
    context: ServerContext = request.app.state.context
    healthy = context.lifecycle.ready and liveness_problem(context) is None
    return Response(status_code=200 if healthy else 503)


def liveness_problem(context: ServerContext) -> str | None:
    """Return the reason why this process should be restarted, or None."""
    lifecycle = context.lifecycle
    if lifecycle.phase in ("failed", "stopped"):
        return lifecycle.detail or lifecycle.phase
    if context.client is None or context.client.ready_info is None:
        return None
    silence_s = time.monotonic() - context.client.last_message_s
    return f"the engine process is silent for {silence_s:.0f} s" if silence_s > MAX_SILENCE_S else None


def _report(body: dict[str, Any], good: bool) -> Response:
    return Response(orjson.dumps(body), status_code=200 if good else 503, media_type="application/json")


async def show_metrics(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    scrape = context.metrics.scrape(request.headers.get("accept", ""))
    return Response(scrape.body, headers={"content-type": scrape.content_type})


async def show_version(request: Request) -> Response:
    """Show the versions and, once known, the kernels: an operator sees here which models run slower than they could."""
    context: ServerContext = request.app.state.context
    ready = None if context.client is None else context.client.ready_info
    compute = {"compute": ready.compute} if ready is not None and ready.compute else {}
    return Response(
        orjson.dumps({"version": VERSION, "protocol": PROTOCOL_VERSION, **compute}), media_type="application/json"
    )


async def show_openapi(request: Request) -> Response:
    described = document("Pagemill engine", VERSION, with_metrics=True)
    return Response(described, media_type="application/json")


async def show_docs(request: Request) -> Response:
    return docs_page(document("Pagemill engine", VERSION, with_metrics=True))


async def show_load(request: Request) -> Response:
    """Show the number of requests inside the engine, running or waiting."""
    client = request.app.state.context.client
    return JSONResponse({"server_load": 0 if client is None else client.num_requests})


async def show_server_info(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    ready = None if context.client is None else context.client.ready_info
    loaded = {}
    if ready is not None:
        limits = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_dtype")
        loaded = {name: getattr(ready.limits, name) for name in limits}
        loaded |= {"device": ready.device, "compute": ready.compute}
    return JSONResponse({"version": VERSION, "models": context.all_names, **loaded})


COMMON_ROUTES = [
    Route("/livez", livez),
    Route("/readyz", readyz),
    Route("/metrics", show_metrics),
    Route("/version", show_version),
]
DATA_ROUTES = [
    *COMMON_ROUTES,
    Route("/health", health),
    Route("/ping", health),
    Route("/load", keyed(show_load)),
    Route("/server_info", keyed(show_server_info)),
    Route(HOME_PATH, home),
    Route(OPENAPI_PATH, show_openapi),
    Route(DOCS_PATH, show_docs),
    *(Route(path, livez) for path in LIVE_PATHS),
    *(Route(path, readyz) for path in READY_PATHS),
    Route("/v1/models", openai_routes.by_version(keyed(openai_routes.list_models))),
    Route("/v1/models/{name:path}", openai_routes.by_version(keyed(openai_routes.get_model))),
    *(
        Route(path, with_errors(each.error_body, keyed(openai_routes.generate_route(each))), methods=["POST"])
        for path, each in generating_routes().items()
    ),
    *(
        Route(each.path, with_errors(each.error_body, keyed(openai_routes.page_route(each))), methods=[each.method])
        for each in PAGES
    ),
    *(Route(each.path, keyed(openai_routes.count_route(each)), methods=["POST"]) for each in TOKEN_COUNTS),
    Route("/detokenize", keyed(openai_routes.detokenize), methods=["POST"]),
    Route(LINK_PATH, internal_routes.link),
]
CONTROL_ROUTES = [
    *COMMON_ROUTES,
    Route("/internal/state", internal_routes.state),
    Route("/internal/bundle", internal_routes.bundle),
    Route("/internal/drain", internal_routes.drain, methods=["POST"]),
    Route("/internal/drained", internal_routes.drained, methods=["POST"]),
    Route("/sleep", sleep_routes.sleep, methods=["POST"]),
    Route("/wake_up", sleep_routes.wake_up, methods=["POST"]),
    Route("/is_sleeping", sleep_routes.is_sleeping),
]


ADAPTER_ROUTES = [
    Route("/v1/load_lora_adapter", keyed(openai_routes.load_adapter), methods=["POST"]),
    Route("/v1/unload_lora_adapter", keyed(openai_routes.unload_adapter), methods=["POST"]),
]


def data_app(context: ServerContext) -> ASGIApp:
    """Build the app of the data port.

    Only the client routes need guards here: routes for gateways check the internal token themselves.
    """
    server = context.settings.server
    routes = [*DATA_ROUTES, *(ADAPTER_ROUTES if server.enable_lora_routes else [])]
    is_open = context.keys.open and not server.only_gateways and is_loopback_address(server.host)
    app = _app(context, routes, lambda app: HostGuard(app, server.allowed_hosts) if is_open else app, error_body_at)
    app = Cors(app, server.allowed_origins) if server.allowed_origins else app
    return TraceRequests(app, context.tracing)


def control_app(context: ServerContext) -> ASGIApp:
    allowed_hosts = context.settings.server.control_allowed_hosts
    return _app(context, CONTROL_ROUTES, lambda app: ControlGuard(app, context.tokens, allowed_hosts))


def _app(
    context: ServerContext,
    routes: list[Route],
    guarded: Callable[[ASGIApp], ASGIApp],
    error_body_at: Callable[[str], ErrorBody] = openai_shape,
) -> ASGIApp:
    app = Starlette(routes=routes)
    app.state.context = context
    install_error_handlers(app, error_body_at)
    server = context.settings.server
    bounded = RequestMiddleware(
        guarded(app),
        max_body_bytes=server.max_body_bytes,
        max_header_bytes=server.max_header_bytes,
        body_timeout_s=server.body_timeout_s,
        error_body_at=error_body_at,
    )
    return _CountRequests(bounded, context, {route.path for route in routes})


class _CountRequests:
    """Counts answers by route and status. All unknown paths share one label, so that callers cannot grow the series."""

    def __init__(self, app: ASGIApp, context: ServerContext, paths: set[str]) -> None:
        self._app = app
        self._context = context
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        route = path if path in self._paths else "other"

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._context.metrics.http_request(route, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)

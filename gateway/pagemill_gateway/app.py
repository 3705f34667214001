"""The gateway's two ASGI apps: the routes by path, and the middleware around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill_api.dialects.anthropic import render as anthropic
from pagemill_api.dialects.anthropic.message_batches import PATH as MESSAGE_BATCHES
from pagemill_api.dialects.error_shapes import error_body_at
from pagemill_api.dialects.pages import Page, PageRequest
from pagemill_api.dialects.registry import LIVE_PATHS, PAGES, READY_PATHS, generating_routes
from pagemill_api.dialects.token_counts import TOKEN_COUNTS
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openapi import OPENAPI_PATH
from pagemill_gateway.config import BatchesConfig
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.routes.access import AccessLog
from pagemill_gateway.routes.batches import BATCHES, FILES, BatchRoutes, MessageBatchRoutes
from pagemill_gateway.routes.body import read_counted
from pagemill_gateway.routes.control import ControlRoutes
from pagemill_gateway.routes.counted_answers import CountedAnswers
from pagemill_gateway.routes.entry import caller_of, entered
from pagemill_gateway.routes.generate import GenerateRoute
from pagemill_gateway.routes.health import RUNBOOKS_PATH, VERSION, HealthRoutes
from pagemill_gateway.routes.models import ModelRoutes
from pagemill_gateway.routes.multipart import OVERHEAD_BYTES
from pagemill_gateway.routes.page.files_and_state import page_routes
from pagemill_gateway.routes.stored import conversations, responses
from pagemill_gateway.routes.stored.conversations import ConversationRoutes
from pagemill_gateway.routes.stored.responses import ResponsesRoute, StoredResponseRoutes
from pagemill_gateway.routes.tokens import TokenRoutes
from pagemill_gateway.routes.websocket.responses import WebSocketRoute
from pagemill_gateway.worker import Worker
from pagemill_servers.auth import is_loopback_address
from pagemill_servers.cors import Cors
from pagemill_servers.docs_page import DOCS_PATH
from pagemill_servers.errors import with_errors
from pagemill_servers.guard import ControlGuard, HostGuard
from pagemill_servers.home_page import HOME_PATH, home
from pagemill_servers.keys.caller import Caller
from pagemill_servers.request_middleware import RequestMiddleware, check_json_content_type, install_error_handlers

MAX_CATALOG_BYTES = 16 * 1024 * 1024


def page_route(worker: Worker, page: Page) -> Callable[[Request], Awaitable[Response]]:
    models = ModelRoutes(worker)

    async def route(request: Request) -> Response:
        caller = caller_of(worker, request)
        raw = await _read(worker, caller, request) if page.method == "POST" else b""
        info = RequestInfo(request.scope["path"], request.path_params, request.headers.get)
        body = page.body(PageRequest(await models.cards(caller), info, raw, VERSION))
        return Response(body, media_type="application/json")

    return with_errors(page.error_body, route)


async def _read(worker: Worker, caller: Caller, request: Request) -> bytes:
    check_json_content_type(request.scope)
    with entered(worker, caller, is_limited=False) as entry:
        return await read_counted(request.scope, request.receive, entry.slot, worker.config.max_body_bytes)


def hot_routes(worker: Worker) -> dict[str, ASGIApp]:
    """Return the generating routes of all dialects by path, including paths with parameters."""
    routes: dict[str, ASGIApp] = {path: GenerateRoute(worker, each) for path, each in generating_routes().items()}
    if worker.config.stored_responses is not None:
        routes[responses.PATH] = ResponsesRoute(worker, worker.config.stored_responses)
    return routes


def data_routes(worker: Worker, hot: Mapping[str, ASGIApp]) -> list[Route]:
    """Return all routes of the data port."""
    models, tokens, stored = ModelRoutes(worker), TokenRoutes(worker), StoredResponseRoutes(worker)
    batches, messages = BatchRoutes(worker), MessageBatchRoutes(worker)
    health = HealthRoutes(worker.control, lambda: worker.draining)
    return [
        *(Route(path, route, methods=["POST"]) for path, route in hot.items()),
        *(Route(each.path, page_route(worker, each), methods=[each.method]) for each in PAGES),
        *(Route(path, health.livez) for path in LIVE_PATHS),
        *(Route(path, health.readyz) for path in READY_PATHS),
        Route(HOME_PATH, home),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.get),
        *(Route(each.path, tokens.count_route(each), methods=["POST"]) for each in TOKEN_COUNTS),
        Route(responses.PATH, WebSocketRoute(worker), methods=["GET"]),
        Route(responses.BY_ID, stored.get),
        Route(responses.BY_ID, stored.delete, methods=["DELETE"]),
        Route(f"{responses.BY_ID}/cancel", stored.cancel, methods=["POST"]),
        Route(f"{responses.BY_ID}/input_items", stored.input_items),
        *_conversation_routes(ConversationRoutes(worker)),
        Route(FILES, batches.upload, methods=["POST"]),
        Route(FILES, batches.list_files),
        Route(f"{FILES}/{{id}}", batches.get_file),
        Route(f"{FILES}/{{id}}", batches.delete_file, methods=["DELETE"]),
        Route(f"{FILES}/{{id}}/content", batches.content),
        Route(BATCHES, batches.create, methods=["POST"]),
        Route(BATCHES, batches.list),
        Route(f"{BATCHES}/{{id}}", batches.get),
        Route(f"{BATCHES}/{{id}}/cancel", batches.cancel, methods=["POST"]),
        *(
            Route(f"{MESSAGE_BATCHES}{path}", with_errors(anthropic.error_body, route), methods=[method])
            for path, route, method in (
                ("", messages.create, "POST"),
                ("", messages.list, "GET"),
                ("/{id}", messages.get, "GET"),
                ("/{id}", messages.delete, "DELETE"),
                ("/{id}/cancel", messages.cancel, "POST"),
                ("/{id}/results", messages.results, "GET"),
            )
        ),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", health.readyz),
        Route("/livez", health.livez),
        Route("/readyz", health.readyz),
        Route("/ping", health.readyz),
        Route("/version", health.version),
        Route("/load", models.load),
        Route("/server_info", models.server_info),
        Route(OPENAPI_PATH, health.openapi),
        Route(DOCS_PATH, health.docs),
        Route(RUNBOOKS_PATH, health.runbook),
        *page_routes(worker),
    ]


def _conversation_routes(routes: ConversationRoutes) -> list[Route]:
    by_id = f"{conversations.PATH}/{{id}}"
    return [
        Route(conversations.PATH, routes.create, methods=["POST"]),
        Route(by_id, routes.get),
        Route(by_id, routes.update, methods=["POST"]),
        Route(by_id, routes.delete, methods=["DELETE"]),
        Route(f"{by_id}/items", routes.list_items),
        Route(f"{by_id}/items", routes.add_items, methods=["POST"]),
        Route(f"{by_id}/items/{{item}}", routes.get_item),
        Route(f"{by_id}/items/{{item}}", routes.delete_item, methods=["DELETE"]),
    ]


def data_app(worker: Worker) -> ASGIApp:
    """Return the app of the data port."""
    hot = hot_routes(worker)
    app = Starlette(routes=data_routes(worker, hot))
    install_error_handlers(app, error_body_at)
    config = worker.config
    worker.run_batches(AccessLog(_HotPaths(hot, app), worker))
    routed: ASGIApp = _HotPaths(hot, CountedAnswers(app, worker))
    if worker.keys.open and is_loopback_address(config.host):
        routed = HostGuard(routed, config.allowed_hosts)
    bounded: ASGIApp = RequestMiddleware(
        routed,
        max_body_bytes=config.max_body_bytes,
        max_header_bytes=config.max_header_bytes,
        body_timeout_s=config.body_timeout_s,
        uploads=_uploads(config.batches) if config.batches is not None else None,
        error_body_at=error_body_at,
    )
    return AccessLog(Cors(bounded, config.allowed_origins) if config.allowed_origins else bounded, worker)


def _uploads(config: BatchesConfig) -> dict[str, tuple[int, float]]:
    return {FILES: (config.max_file_bytes + OVERHEAD_BYTES, config.upload_timeout_s)}


class _HotPaths:
    """Calls these routes directly, because the framework's layers cost more than the rest of a chunk's processing."""

    def __init__(self, routes: Mapping[str, ASGIApp], others: ASGIApp) -> None:
        self._routes = routes
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        app = self._routes.get(scope["path"], self._others) if is_post else self._others
        await app(scope, receive, send)


def control_routes(head: ControlProcess) -> list[Route]:
    """Return all routes of the control port."""
    control, health = ControlRoutes(head), HealthRoutes(head, lambda: head.draining)
    return [
        Route("/catalog", control.put_catalog, methods=["PUT"]),
        Route("/status", control.status),
        Route("/debug/decisions", control.decisions),
        Route("/internal/load", control.load),
        Route("/internal/scaling", control.scaling, methods=["POST"]),
        Route("/livez", health.livez),
        Route("/readyz", health.readyz),
        Route("/version", health.version),
        Route("/metrics", control.metrics),
    ]


def control_app(head: ControlProcess) -> ASGIApp:
    """Return the app of the control port; all routes but probes and metrics need a token."""
    app = Starlette(routes=control_routes(head))
    install_error_handlers(app)
    config = head.config
    return RequestMiddleware(
        ControlGuard(app, head.control_tokens, config.control_allowed_hosts),
        max_body_bytes=MAX_CATALOG_BYTES,
        max_header_bytes=config.max_header_bytes,
        body_timeout_s=config.body_timeout_s,
    )

"""The routes of dialects that generate nothing, answered from the names that the caller may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from pagemill_gateway.routes.body import read_counted
from pagemill_gateway.routes.health import VERSION
from pagemill_gateway.routes.models import ModelRoutes
from pagemill_gateway.worker import Worker
from pagemill_protocol.dialects.pages import Asked, Page
from pagemill_protocol.dialects.transport import Place
from pagemill_protocol.http.door import check_json_content_type
from pagemill_protocol.http.errors import with_errors


def page_route(worker: Worker, page: Page) -> Callable[[Request], Awaitable[Response]]:
    models = ModelRoutes(worker)

    async def route(request: Request) -> Response:
        caller = worker.keys.authenticate(request.scope)
        raw = await _read(worker, request) if page.method == "POST" else b""
        place = Place(request.scope["path"], request.path_params, request.headers.get)
        body = page.body(Asked(await models.cards(caller), place, raw, VERSION))
        return Response(body, media_type="application/json")

    return with_errors(page.error_body, route)


async def _read(worker: Worker, request: Request) -> bytes:
    check_json_content_type(request.scope)
    with worker.gate.enter() as slot:
        return await read_counted(request.scope, request.receive, slot, worker.config.max_body_bytes)

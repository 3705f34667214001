"""The routes of probes and version, on both ports, and of the data port's API description and alerts' pages.

Ready means that the gateway accepts requests, regardless of the engines' load. On the data port, a worker reports the
state of the whole gateway, or that it drains itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pagemill_api.openapi import document
from pagemill_gateway.ports import ControlProcessPort
from pagemill_protocol.errors import not_found
from pagemill_protocol.versions import PROTOCOL_VERSION
from pagemill_servers.docs_page import docs_page

VERSION = version("pagemill-gateway")
RUNBOOKS_PATH = "/runbooks/{name}"
RUNBOOKS = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parents[1] / "runbooks").glob("*.md")}
"""The pages of alerts, which `charts/generate.py` copies; read once, so no path of a client is used."""


class HealthRoutes:
    def __init__(self, control: ControlProcessPort, is_draining: Callable[[], bool]) -> None:
        """`is_draining` returns whether this process drains."""
        self._control = control
        self._is_draining = is_draining

    async def livez(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def readyz(self, request: Request) -> Response:
        status = await self._control.status()
        draining = status.draining or self._is_draining()
        ready = status.ready and not draining
        phase = "draining" if draining else "ready" if ready else "starting"
        detail = status.detail or ("the gateway is shutting down" if draining else "")
        return JSONResponse({"ready": ready, "phase": phase, "detail": detail}, status_code=200 if ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION, "protocol": PROTOCOL_VERSION})

    async def openapi(self, request: Request) -> Response:
        return Response(document("Pagemill gateway", VERSION, with_stores=True), media_type="application/json")

    async def runbook(self, request: Request) -> Response:
        """Return the page of an alert, to which the alert links."""
        text = RUNBOOKS.get(request.path_params["name"].removesuffix(".md"))
        if text is None:
            raise not_found(request.scope["path"])
        return PlainTextResponse(text)

    async def docs(self, request: Request) -> Response:
        return docs_page(document("Pagemill gateway", VERSION, with_stores=True))

"""Probes, version and metrics, on both ports, and the data port's description of itself.

Ready means: takes new requests; it says nothing about engines' load. On the data port a worker answers for the whole
gateway, so far as it is not itself on its way out.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagemill_gateway.desks import HeadDesk
from pagemill_gateway.limits.keys import KeyRing
from pagemill_gateway.version import VERSION
from pagemill_protocol.errors import not_found
from pagemill_protocol.metrics import CONTENT_TYPE
from pagemill_protocol.openai.openapi import document


class HealthRoutes:
    def __init__(self, head: HeadDesk, is_draining: Callable[[], bool]) -> None:
        """`is_draining`: whether who answers here is on its way out."""
        self._head = head
        self._is_draining = is_draining

    async def livez(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def readyz(self, request: Request) -> Response:
        standing = await self._head.standing()
        draining = standing.draining or self._is_draining()
        ready = standing.ready and not draining
        phase = "draining" if draining else "ready" if ready else "starting"
        detail = standing.detail or ("the gateway is shutting down" if draining else "")
        return JSONResponse({"ready": ready, "phase": phase, "detail": detail}, status_code=200 if ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        return Response(document("Pagemill gateway", VERSION), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(await self._head.metrics_text(), headers={"content-type": CONTENT_TYPE})


class GuardedMetrics:
    """On the data port, where clients are: only for those with a key, and one that nothing is kept from."""

    def __init__(self, health: HealthRoutes, keys: KeyRing) -> None:
        self._health = health
        self._keys = keys

    async def metrics(self, request: Request) -> Response:
        if not self._keys.authenticate(request.scope).unrestricted:
            raise not_found(request.scope["path"])
        return await self._health.metrics(request)

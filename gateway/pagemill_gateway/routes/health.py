"""Probes, version and metrics, on both ports, and the data port's description of itself.

Ready means: takes new requests; it says nothing about engines' load.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagemill_gateway.core import Gateway
from pagemill_gateway.version import VERSION
from pagemill_protocol.errors import not_found
from pagemill_protocol.metrics import CONTENT_TYPE
from pagemill_protocol.openai.openapi import document


class HealthRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def livez(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def readyz(self, request: Request) -> Response:
        gateway = self._gateway
        phase = "draining" if gateway.draining else "ready" if gateway.ready else "starting"
        return JSONResponse(
            {"ready": gateway.ready, "phase": phase, "detail": gateway.detail},
            status_code=200 if gateway.ready else 503,
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        return Response(document("Pagemill gateway", VERSION), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        gateway = self._gateway
        current = gateway.discovery is None or not gateway.discovery.detail
        if gateway.sharing.up is not None:
            gateway.metrics.redis_up(gateway.sharing.up)
        text = gateway.metrics.render(
            gateway.brain,
            ready=gateway.ready,
            current=current,
            body_bytes=gateway.gate.num_bytes,
            journal_tokens=gateway.relay.journal_room.num_tokens,
        )
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def guarded_metrics(self, request: Request) -> Response:
        """On the data port, where clients are: only for those with a key, and one that nothing is kept from."""
        if not self._gateway.keys.authenticate(request.scope).unrestricted:
            raise not_found(request.scope["path"])
        return await self.metrics(request)

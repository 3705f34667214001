"""The answers of `/livez`, `/readyz` and `/health` on both ports.

Live means that the loop makes progress: the engine process exists and reported recently (at least every second, also
when idle; one step of a large prompt may take long). Ready means that the model has generated a token since the start
and that no drain was requested. Load never makes a server unready.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pagemill_engine.server.context import ServerContext

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

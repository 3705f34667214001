"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping` of the control port, named as in vLLM's sleep mode.

Level 1 is the only one: the weights stay in the host's memory. The routes are guarded like all of the control port.
`sleeping` carries them out.
"""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.routes.internal_routes import context_of, seconds
from pagemill_protocol.errors import invalid_field, unavailable

LEVEL = "1"
WAIT_S = "30"


async def sleep(request: Request) -> Response:
    """Put the engine to sleep.

    200: it sleeps. 202: requests still run, and it will sleep when they are done. 503: it cannot sleep.
    """
    context = context_of(request)
    level = request.query_params.get("level", LEVEL)
    if level != LEVEL:
        message = f"level must be {LEVEL}, which keeps the weights in memory, got {level[:20]!r}."
        raise invalid_field("level", f"{message} To free them as well, remove the replica.")
    wait_s = seconds(request.query_params.get("wait_s", WAIT_S), "wait_s")
    client, _ = context.ready_engine()
    if context.lifecycle.ending:
        raise unavailable("This server is shutting down.", retry_after_s=1, code="draining")
    state = await context.sleeping.sleep(client, wait_s)
    if state == "waking":
        raise unavailable("The engine is waking up. Ask again when it is awake.", retry_after_s=1, code="not_asleep")
    if state == "awake":
        raise unavailable(context.sleeping.fault or "The engine was woken before it slept.", code="not_asleep")
    return _report(context, 200 if state == "asleep" else 202)


async def wake_up(request: Request) -> Response:
    """Wake the engine up. 200: it accepts requests. 202: it is waking up."""
    context = context_of(request)
    if "tags" in request.query_params:
        raise invalid_field("tags", "The whole engine is woken. Remove `tags`.", code="unsupported_parameter")
    wait_s = seconds(request.query_params.get("wait_s", WAIT_S), "wait_s")
    client, _ = context.ready_engine()
    state = await context.sleeping.wake(client, wait_s)
    return _report(context, 200 if state == "awake" else 202)


async def is_sleeping(request: Request) -> Response:
    return _report(context_of(request), 200)


def _report(context: ServerContext, status: int) -> Response:
    sleeping = context.sleeping
    body = {
        "is_sleeping": sleeping.state == "asleep",
        "state": sleeping.state,
        "num_requests": context.num_requests,
        "released_bytes": sleeping.released_bytes if sleeping.state == "asleep" else 0,
    }
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")

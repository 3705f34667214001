"""The routes `/v1/models`, with the names, aliases and adapters that the key may use, and vLLM's `/server_info` and
`/load`.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagemill_api.dialects.model_lists import card_body, error_body_for, list_body
from pagemill_api.openai import render
from pagemill_gateway.limits.refusals import check_model
from pagemill_gateway.routes.health import VERSION
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import model_not_found
from pagemill_routing.brain.interface import ServedName
from pagemill_servers.errors import with_errors
from pagemill_servers.keys.caller import Caller
from pagemill_servers.origin import forbidden


class ModelRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def list(self, request: Request) -> Response:
        return await with_errors(error_body_for(request.headers.get), self._list)(request)

    async def get(self, request: Request) -> Response:
        return await with_errors(error_body_for(request.headers.get), self._get)(request)

    async def _list(self, request: Request) -> Response:
        cards = await self.cards(self._worker.keys.authenticate(request.scope))
        body = list_body(cards, request.headers.get, request.query_params)
        return Response(body, media_type="application/json")

    async def _get(self, request: Request) -> Response:
        caller = self._worker.keys.authenticate(request.scope)
        name = request.path_params["model"]
        check_model(caller, name)
        names = await self._names(caller)
        if name not in names:
            raise model_not_found(name, [*names])
        card = _card(names[name], await self._started_unix_s())
        return Response(card_body(card, request.headers.get), media_type="application/json")

    async def server_info(self, request: Request) -> Response:
        names = await self._names(self._worker.keys.authenticate(request.scope))
        return JSONResponse({"version": VERSION, "server": "pagemill gateway", "models": [*names]})

    async def load(self, request: Request) -> Response:
        """Return the number of requests in this process; refused to keys, because it counts those of all tenants."""
        if self._worker.keys.authenticate(request.scope).key_hash:
            raise forbidden(
                "The load counts the requests of all keys, so it is not shown to one. The control port's /metrics has "
                "it.",
                "load_not_shown",
            )
        return JSONResponse({"server_load": self._worker.in_flight_limit.num_in_flight})

    async def cards(self, caller: Caller) -> Sequence[render.ModelCard]:
        """Return the cards of all names that the caller may use."""
        names = await self._names(caller)
        started_unix_s = await self._started_unix_s()
        return [_card(each, started_unix_s) for each in names.values()]

    async def _names(self, caller: Caller) -> dict[str, ServedName]:
        return {each.name: each for each in await self._worker.brain.names() if caller.may_use(each.name)}

    async def _started_unix_s(self) -> int:
        return (await self._worker.control.status()).started_unix_s


def _card(served: ServedName, started_unix_s: int) -> render.ModelCard:
    return render.ModelCard(
        id=served.name,
        created_unix_s=started_unix_s,
        max_model_len=served.max_model_len,
        root=served.source or None if served.is_adapter else served.model,
        parent=served.model if served.is_adapter else None,
        pools=served.pools,
    )

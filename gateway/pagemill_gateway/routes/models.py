"""`GET /v1/models`: every name and alias that some deployment serves, ready or not, and the key may use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagemill_gateway.core import Gateway
from pagemill_gateway.limits.refusals import check_model
from pagemill_protocol.errors import model_not_found
from pagemill_protocol.openai import render


class ModelRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def list(self, request: Request) -> Response:
        caller = self._gateway.keys.authenticate(request.scope)
        cards = [self._card(name) for name in self._gateway.brain.registry.names() if caller.may_use(name)]
        return Response(render.models_body(cards), media_type="application/json")

    async def get(self, request: Request) -> Response:
        caller = self._gateway.keys.authenticate(request.scope)
        name = request.path_params["model"]
        check_model(caller, name)
        names = [each for each in self._gateway.brain.registry.names() if caller.may_use(each)]
        if name not in names:
            raise model_not_found(name, names)
        return Response(render.model_body(self._card(name)), media_type="application/json")

    def _card(self, name: str) -> render.ModelCard:
        deployments = self._gateway.brain.registry.named(name)
        lengths = [record.max_model_len for deployment in deployments for record in deployment.usable()]
        return render.ModelCard(
            id=name,
            created_unix_s=self._gateway.started_unix_s,
            max_model_len=min(lengths, default=None),
            root=deployments[0].model.name,
        )

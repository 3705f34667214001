"""The routes of the control port: `PUT /catalog` replaces the catalogue, `POST /internal/scaling` reports decisions of
the operator; `/status`, `/metrics`, `/internal/load` and `/debug/decisions` show the state and the decisions of the
gateway. The guard around the routes checks tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.discovery.catalog import decode_catalog
from pagemill_gateway.routes.load import LoadStream
from pagemill_gateway.ui.scaling import decode_report
from pagemill_protocol.errors import PagemillError, invalid_field, show
from pagemill_protocol.frames import LOAD_CONTENT_TYPE
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.versions import protocol_headers, require_protocol
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_servers.request_middleware import read_body

DEFAULT_DECISIONS = 20
OPERATOR = "The operator"


class ControlRoutes:
    def __init__(self, head: ControlProcess) -> None:
        self._head = head

    async def put_catalog(self, request: Request) -> Response:
        if self._head.discovery is not None:
            raise PagemillError(
                "The catalogue comes from the cluster's objects here. Change the LLMDeployments, or set `discovery` to "
                "`static`.",
                status=409,
                code="catalog_is_discovered",
            )
        require_protocol(request.scope["headers"], OPERATOR)
        catalog = decode_catalog(await read_body(request.receive))
        self._head.apply_catalog(catalog)
        return JSONResponse(
            {"models": len(catalog.models), "endpoints": sum(len(model.endpoints) for model in catalog.models)},
            headers=protocol_headers(),
        )

    async def load(self, request: Request) -> Response | LoadStream:
        """Stream the load of all deployments to the operator, with a frame on every change."""
        if request.method == "HEAD":  # without a body, the endless stream would only occupy the connection
            return Response(headers={"content-type": LOAD_CONTENT_TYPE, **protocol_headers()})
        require_protocol(request.scope["headers"], OPERATOR)
        # An endless body is refused here; after this, the only message to expect is the disconnection.
        await read_body(request.receive)
        return LoadStream(self._head)

    async def scaling(self, request: Request) -> Response:
        """Take decisions on the number of replicas, which the page `/ui` shows."""
        require_protocol(request.scope["headers"], OPERATOR)
        report = decode_report(await read_body(request.receive))
        self._head.scaling_decisions.add(report.decisions)
        return JSONResponse({"decisions": len(report.decisions)}, headers=protocol_headers())

    async def metrics(self, request: Request) -> Response:
        scrape = await self._head.scrape(request.headers.get("accept", ""))
        return Response(scrape.body, headers={"content-type": scrape.content_type})

    async def status(self, request: Request) -> Response:
        deployments = self._head.brain.reader.registry.deployments.values()
        measures = await self._head.measure()
        return JSONResponse(
            {
                "ready": self._head.ready,
                "draining": self._head.draining,
                "detail": self._head.detail,
                "num_requests": sum(each.num_requests for each in measures),
                "workers": len(measures),
                "models": [self._model(deployment) for deployment in deployments],
            }
        )

    async def decisions(self, request: Request) -> Response:
        """Return the latest routing decisions, newest first, with the candidates, their costs and the choice."""
        text = request.query_params.get("limit", str(DEFAULT_DECISIONS))
        if not (text.isascii() and text.isdigit() and len(text) < 7):
            raise invalid_field("limit", f"limit must be a whole number of decisions, got {show(text)}.")
        return JSONResponse({"decisions": self._head.brain.reader.placement.decisions.latest(int(text))})

    def _model(self, deployment: DeploymentRecord) -> dict[str, Any]:
        model = deployment.model
        return {
            "namespace": model.namespace,
            "deployment": model.deployment,
            "name": model.name,
            "aliases": model.aliases,
            "adapters": model.adapters,
            "weight": model.share,
            "queue": self._head.brain.reader.queues.state(deployment.key)._asdict(),
            "endpoints": [self._endpoint(record) for record in deployment.records],
        }

    def _endpoint(self, record: EndpointRecord) -> dict[str, Any]:
        reader = self._head.brain.reader
        state = record.reports.latest
        age_s = reader.state_age_s(record)
        return {
            "id": record.endpoint.id,
            "data_url": record.endpoint.data_url,
            "phase": reader.phase(record),
            "engine_phase": record.phase,
            "detail": record.detail,
            "state_connected": record.reports.connected,
            "state_age_s": round(age_s, 3) if age_s is not None else None,
            "state_gaps": record.reports.num_gaps,
            "in_flight": record.in_flight,
            "unreported_requests": record.dispatches.num_unreported,
            "reserved_bytes": record.reserved.num_bytes,
            "in_flight_elsewhere": reader.load_elsewhere(record),
            "failures": reader.recovery.ejection(record).num_failures,
            "max_model_len": record.max_model_len,
            "adapters": {name: msgspec.to_builtins(each) for name, each in record.adapters.by_name.items()},
            "adapters_resident": state.adapters.resident if state is not None else [],
            "load": _load_of(state.load) if state is not None else None,
        }


def _load_of(load: EngineLoad) -> dict[str, object]:
    """Return a report's load with all fields, as JSON can represent them."""
    return msgspec.structs.asdict(load) | {"kind_bytes": msgspec.to_builtins(load.kind_bytes)}

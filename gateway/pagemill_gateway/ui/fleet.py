"""Describes the whole fleet for the page `/ui`: models, queues and engines, as plain values.

It only reads the brain. `history` keeps how loads changed, `routes` sends both to browsers.
"""

from __future__ import annotations

from typing import Any

from pagemill_gateway.ports import GatewayStatus
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.reading import Reader


def describe_fleet(reader: Reader, status: GatewayStatus) -> dict[str, Any]:
    """Return the gateway's state and, for each deployment, its names, queue and engines."""
    return {
        "ready": status.ready,
        "draining": status.draining,
        "detail": status.detail,
        "started_unix_s": status.started_unix_s,
        "models": [_model(reader, each) for each in reader.registry.deployments.values()],
    }


def _model(reader: Reader, deployment: DeploymentRecord) -> dict[str, Any]:
    model, queue = deployment.model, reader.queues.state(deployment.key)
    return {
        "key": deployment.key,
        "name": model.name,
        "aliases": model.aliases,
        "adapters": [*model.adapters],
        "queue": {"requests": queue.num_requests, "oldest_s": round(queue.oldest_age_s, 1)},
        "engines": [_engine(reader, each) for each in deployment.records],
    }


def _engine(reader: Reader, record: EndpointRecord) -> dict[str, Any]:
    """Return one engine; of one that has never reported, without its load."""
    phase = reader.phase(record)
    tile = {
        "id": record.endpoint.id,
        # What its server says, or that nothing listens there, is more exact than that it takes no requests.
        "phase": record.phase if phase == "starting" else phase,
        "detail": record.detail,
        "in_flight": record.in_flight,
    }
    state = record.reports.latest
    if state is None:
        return tile
    load = state.load
    return {
        **tile,
        "running": load.num_requests_running,
        "waiting": load.num_requests_waiting,
        "max_running": state.max_num_seqs,
        "kv": {
            "unit": "bytes" if state.kinds else "blocks",
            "active": load.num_kv_bytes_active,
            "cached": load.num_kv_bytes_evictable,
            "free": load.num_kv_bytes_free,
        },
        "tokens_per_s": round(_tokens_per_s(state), 1),
    }


def _tokens_per_s(state: StateFrame) -> float:
    """Return about how many tokens the engine generates in a second, by the time of its latest step: each running
    request gets a token, or more where proposed tokens are right."""
    load = state.load
    if not load.num_requests_running or load.step_ms <= 0:
        return 0.0
    return load.num_requests_running * state.step_time.tokens_per_decode * 1000 / load.step_ms

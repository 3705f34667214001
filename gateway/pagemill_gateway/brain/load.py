"""What all engines of a deployment say together: the operator's view, without the detail that routing needs. Pure."""

from __future__ import annotations

import msgspec

from pagemill_gateway.brain.queues import Queues, QueueState
from pagemill_gateway.brain.registry import Deployment, EndpointRecord, Registry

RESOLUTION = 1000
"""Of the KV cache usage: smaller changes are no news."""


class DeploymentLoad(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    kv_cache_usage: float | None
    """Blocks of running requests, as share of all blocks; `None` while no engine reports."""
    running: int
    waiting: int
    ready: int
    """Engines that take requests."""
    age_s: float | None
    """Of the oldest report in here."""
    queued: int = 0
    """Requests that wait in this gateway; unlike the rest, other gateways know nothing of them."""
    queued_bytes: int = 0
    queued_oldest_s: float | None = None
    """How long the one that waits longest has been here."""

    def same_but_older(self, other: DeploymentLoad) -> bool:
        return self._ageless() == other._ageless()

    def _ageless(self) -> DeploymentLoad:
        return msgspec.structs.replace(self, age_s=None, queued_oldest_s=None)


def measure_load(registry: Registry, queues: Queues, now: float) -> list[DeploymentLoad]:
    """One entry per deployment. Reports that are no longer believed do not count."""
    deployments = registry.deployments.values()
    return [_of_deployment(deployment, queues.state(deployment.key), now) for deployment in deployments]


def _of_deployment(deployment: Deployment, queue: QueueState, now: float) -> DeploymentLoad:
    reporting = [record for record in deployment.records if record.reports.fresh(now) and record.max_model_len > 0]
    loads = [record.reports.latest.load for record in reporting if record.reports.latest is not None]
    total = sum(load.num_blocks_total for load in loads)
    active = sum(load.num_blocks_active for load in loads)
    ages = [age for record in reporting if (age := record.reports.age_s(now)) is not None]
    return DeploymentLoad(
        namespace=deployment.model.namespace,
        name=deployment.model.deployment,
        kv_cache_usage=round(active / total * RESOLUTION) / RESOLUTION if total else None,
        running=sum(load.num_requests_running for load in loads),
        waiting=sum(load.num_requests_waiting for load in loads),
        ready=sum(_takes_requests(record) for record in deployment.records),
        age_s=round(max(ages), 3) if ages else None,
        queued=queue.num_requests,
        queued_bytes=queue.num_bytes,
        queued_oldest_s=round(queue.oldest_age_s, 3) if queue.num_requests else None,
    )


def _takes_requests(record: EndpointRecord) -> bool:
    return record.usable and record.reports.connected

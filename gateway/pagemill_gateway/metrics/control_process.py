"""The metrics that exist once in a gateway, updated at each scrape, and the sums of the workers' metrics.

The counters of a worker that ended are kept, so that totals do not decrease when a worker is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

from pagemill_gateway.metrics.beginnings import NO_TENANT, begin_deployment, begin_gateway
from pagemill_gateway.metrics.departed import Departed
from pagemill_gateway.ports import WorkerMeasurements
from pagemill_protocol import metrics as specs
from pagemill_routing.brain.queue import queues
from pagemill_routing.brain.queue.queues import QueueState
from pagemill_routing.brain.reading import Reader
from pagemill_routing.brain.resilience import poison_requests

PHASES = ("ready", "starting", "stale", "ejected", "sleeping", "draining")


class ControlProcessMetrics:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = specs.Metrics(specs.GATEWAY_METRICS)
        self._endpoints: set[tuple[str, str]] = set()
        self._variants: set[tuple[str, str]] = set()
        """The pairs of model and deployment that have series."""
        self._queued_models: set[str] = set()
        self._counted: dict[tuple[str, str, str], int] = {}
        """The brain's counts at the latest scrape, by metric, deployment and outcome."""
        self._departed: specs.Samples = {}
        self._gone_tenants = Departed(clock)
        begin_gateway(self._metrics)
        self._has_redis = False

    def decided_without_redis(self) -> None:
        """Count a limit that was decided without Redis."""
        self._metrics.counter(specs.GATEWAY_LIMITS_WITHOUT_REDIS).inc()

    def redis_up(self, up: bool) -> None:
        self._has_redis = True
        self._metrics.gauge(specs.GATEWAY_REDIS_UP).set(int(up))

    def keys_file_valid(self, valid: bool) -> None:
        self._metrics.gauge(specs.GATEWAY_KEYS_FILE_VALID).set(int(valid))

    def catalog_own(self, own: bool) -> None:
        self._metrics.gauge(specs.GATEWAY_CATALOG_OWN).set(int(own))

    def control_process_restarted(self, times: int) -> None:
        """Count the restarts before this process."""
        self._metrics.counter(specs.GATEWAY_CONTROL_PROCESS_RESTARTS).inc(times)

    def worker_left(self, samples: specs.Samples, *, lost: bool) -> None:
        """Keep the last values of a worker that ended."""
        self._metrics.counter(specs.GATEWAY_WORKERS_LOST).inc(int(lost))
        self._departed = specs.add_up([self._departed, _totals(samples)])

    def scrape(
        self, reader: Reader, workers: list[WorkerMeasurements], *, ready: bool, current: bool, accept: str
    ) -> specs.Scrape:
        """Return all metrics with current gauges, in the format that the header `accept` requests."""
        self._metrics.gauge(specs.GATEWAY_READY).set(int(ready))
        self._metrics.gauge(specs.GATEWAY_CATALOG_CURRENT).set(int(current))
        self._metrics.gauge(specs.GATEWAY_WORKERS).set(len(workers))
        self._metrics.gauge(specs.GATEWAY_PREFIX_CHUNKS).set(len(reader.placement.index))
        self._set_deployments(reader)
        if workers:
            self._drop_gone(frozenset().union(*(each.tenants for each in workers)))
        together = specs.add_up([self._metrics.samples(), self._departed, *(each.samples for each in workers)])
        if not self._has_redis:
            # A gauge without labels has a value from the start, and 0 would mean that Redis is unavailable.
            del together[specs.GATEWAY_REDIS_UP.name]
        return specs.scrape_samples(specs.GATEWAY_METRICS, together, accept)

    def _set_deployments(self, reader: Reader) -> None:
        deployments = reader.registry.deployments.values()
        self._metrics.gauge(specs.GATEWAY_CATALOG_MODELS).set(len({each.model.name for each in deployments}))
        variants = {(deployment.model.name, deployment.key) for deployment in deployments}
        phases = dict.fromkeys(product(self._variants | variants, PHASES), 0)
        for model, variant in variants - self._variants:
            begin_deployment(self._metrics, model, variant)
        self._variants = variants
        self._set_queues(reader)
        self._count(reader)
        endpoints: set[tuple[str, str]] = set()
        for deployment in deployments:
            model = deployment.model.name
            for record in deployment.records:
                phases[(model, deployment.key), reader.phase(record)] += 1
                endpoints.add((model, record.endpoint.id))
                labels = {"model": model, "endpoint": record.endpoint.id}
                self._metrics.gauge(specs.GATEWAY_ENDPOINT_IN_FLIGHT, **labels).set(record.in_flight)
                self._metrics.gauge(specs.GATEWAY_RESERVED_BYTES, **labels).set(record.reserved.num_bytes)
                age_s = reader.state_age_s(record)
                if age_s is not None:
                    self._metrics.gauge(specs.GATEWAY_STATE_AGE_SECONDS, **labels).set(age_s)
        for ((model, variant), phase), count in phases.items():
            self._metrics.gauge(specs.GATEWAY_ENDPOINTS, model=model, variant=variant, phase=phase).set(count)
        self._forget(self._endpoints - endpoints)
        self._endpoints = endpoints

    def _set_queues(self, reader: Reader) -> None:
        """Set the gauges of queues. Deployments with the same model name share series."""
        models = {model for model, _ in self._variants}
        waiting = {model: [QueueState()] for model in models | self._queued_models}
        self._queued_models = models
        for deployment in reader.registry.deployments.values():
            waiting[deployment.model.name].append(reader.queues.state(deployment.key))
        for model, states in waiting.items():
            requests, sizes, _, ages = zip(*states, strict=True)
            self._metrics.gauge(specs.GATEWAY_QUEUE_REQUESTS, model=model).set(sum(requests))
            self._metrics.gauge(specs.GATEWAY_QUEUE_BYTES, model=model).set(sum(sizes))
            self._metrics.gauge(specs.GATEWAY_QUEUE_OLDEST_SECONDS, model=model).set(max(ages))
            # Workers count from the first request on, but autoscaling on this metric needs 0 without traffic.
            self._metrics.gauge(specs.GATEWAY_IN_FLIGHT, model=model).set(0)

    def _count(self, reader: Reader) -> None:
        """Add the brain's counts since the latest scrape to the counters."""
        counted: dict[tuple[str, str, str], int] = {}
        for deployment in reader.registry.deployments.values():
            key = deployment.key
            ended = [(specs.GATEWAY_QUEUE_ENDED, each, reader.queues.outcomes[key, each]) for each in queues.OUTCOMES]
            tried = [
                (specs.GATEWAY_POISON_PROBES, each, reader.poison_detection.outcomes[key, each])
                for each in poison_requests.OUTCOMES
            ]
            for spec, outcome, total in [*ended, *tried]:
                before = self._counted.get((spec.name, key, outcome), 0)
                counted[spec.name, key, outcome] = total
                labels = {"model": deployment.model.name, "outcome": outcome}
                self._metrics.counter(spec, **labels).inc(max(0, total - before))
        self._counted = counted

    def _drop_gone(self, tenants: frozenset[str]) -> None:
        """Drop departed workers' series of tenants that have been gone for a while."""
        samples = self._departed
        known = {_label(each, "tenant") for series in samples.values() for each in series} - {""}
        if gone := self._gone_tenants.over(known, tenants | {NO_TENANT}):
            self._departed = {
                name: [each for each in series if _label(each, "tenant") not in gone]
                for name, series in samples.items()
            }

    def _forget(self, gone: set[tuple[str, str]]) -> None:
        for model, endpoint_id in gone:
            for spec in (
                specs.GATEWAY_ENDPOINT_IN_FLIGHT,
                specs.GATEWAY_RESERVED_BYTES,
                specs.GATEWAY_STATE_AGE_SECONDS,
            ):
                self._metrics.forget(spec, model=model, endpoint=endpoint_id)


def _totals(samples: specs.Samples) -> specs.Samples:
    """Return the samples without gauges."""
    return {each.name: samples.get(each.name, []) for each in specs.GATEWAY_METRICS if each.kind != "gauge"}


def _label(sample: specs.Sample, name: str) -> str:
    return dict(sample.labels).get(name, "")

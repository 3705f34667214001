"""What the gateway measures, in the names of `pagemill_protocol.metrics`.

Counters and histograms move as things happen, gauges are brought up to date at the scrape.
"""

from __future__ import annotations

from typing import get_args

from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.brain.interface import Choice, FailureKind
from pagemill_gateway.brain.queues import OUTCOMES, QueueState
from pagemill_gateway.relay.record import RequestRecord
from pagemill_protocol import metrics as specs

PHASES = ("ready", "starting", "stale", "ejected", "draining")


class GatewayMetrics:
    def __init__(self) -> None:
        self._metrics = specs.Metrics(specs.GATEWAY_METRICS)
        self._endpoints: set[tuple[str, str]] = set()
        self._models: set[str] = set()
        self._queued_models: set[str] = set()
        self._ended: dict[tuple[str, str], int] = {}

    def prepared(self, record: RequestRecord) -> None:
        self._metrics.gauge(specs.GATEWAY_IN_FLIGHT, model=record.model).inc()
        self._metrics.histogram(specs.GATEWAY_PREPARE_SECONDS, model=record.model).observe(record.prepare_s or 0.0)

    def finished(self, record: RequestRecord) -> None:
        """One request is over, served or not."""
        model = record.model
        self._metrics.counter(specs.GATEWAY_REQUESTS, model=model, route=record.route, status=str(record.status)).inc()
        if record.status >= 400 and not record.endpoints:
            self._metrics.counter(specs.GATEWAY_REJECTED, code=record.error_code or str(record.status)).inc()
        if record.prepare_s is None:
            return
        self._metrics.gauge(specs.GATEWAY_IN_FLIGHT, model=model).dec()
        self._metrics.histogram(specs.GATEWAY_REQUEST_SECONDS, model=model).observe(record.duration_s())
        if record.stream and record.ttft_s is not None:
            self._metrics.histogram(specs.GATEWAY_TTFT_SECONDS, model=model).observe(record.ttft_s)
        usage = record.usage
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            self._metrics.counter(specs.GATEWAY_TOKENS, model=model, kind=kind).inc(tokens)

    def routed(self, model: str, choice: Choice, seconds: float) -> None:
        self._metrics.histogram(specs.GATEWAY_ROUTING_SECONDS, model=model).observe(seconds)
        basis = "reported" if choice.believed else "own_counts"
        self._metrics.counter(specs.GATEWAY_ROUTING_DECISIONS, model=model, policy=choice.policy, basis=basis).inc()

    def first_token(self, model: str, choice: Choice, seconds: float) -> None:
        """The first token of a stream is here, this long after it was sent to the engine."""
        if choice.predicted_ttft_ms is not None and seconds > 0:
            error = abs(choice.predicted_ttft_ms / 1000 - seconds) / seconds
            self._metrics.histogram(specs.GATEWAY_TTFT_ERROR, model=model).observe(error)

    def cached(self, model: str, choice: Choice, num_cached_tokens: int) -> None:
        """How many cached tokens the engine really found."""
        missed = num_cached_tokens - choice.predicted_cached_tokens
        outcome = "under" if missed >= max(1, choice.granule_tokens) else "over" if missed < 0 else "exact"
        self._metrics.counter(specs.GATEWAY_CACHED_PREDICTIONS, model=model, outcome=outcome).inc()
        if outcome != "exact":
            self._metrics.counter(specs.GATEWAY_CACHED_ERROR_TOKENS, model=model).inc(abs(missed))

    def queued(self, model: str, seconds: float) -> None:
        """A request waited and got its engine."""
        self._metrics.histogram(specs.GATEWAY_QUEUE_SECONDS, model=model).observe(seconds)

    def attempt(self, model: str, endpoint_id: str, outcome: str) -> None:
        self._metrics.counter(specs.GATEWAY_UPSTREAM_ATTEMPTS, model=model, endpoint=endpoint_id, outcome=outcome).inc()

    def retry(self, model: str, reason: FailureKind) -> None:
        self._metrics.counter(specs.GATEWAY_UPSTREAM_RETRIES, model=model, reason=reason).inc()

    def limited(self, reason: str) -> None:
        self._metrics.counter(specs.GATEWAY_LIMITED, reason=reason).inc()

    def reserved(self, seconds: float) -> None:
        self._metrics.histogram(specs.GATEWAY_RESERVE_SECONDS).observe(seconds)

    def decided_alone(self) -> None:
        """Redis could not be asked."""
        self._metrics.counter(specs.GATEWAY_LIMITS_ALONE).inc()

    def tenant_used(self, tenant: str, prompt: int, completion: int) -> None:
        for kind, tokens in (("prompt", prompt), ("completion", completion)):
            self._metrics.counter(specs.GATEWAY_TENANT_TOKENS, tenant=tenant, kind=kind).inc(tokens)

    def migrated(self, model: str, reason: FailureKind, num_tokens: int) -> None:
        self._metrics.counter(specs.GATEWAY_MIGRATIONS, model=model, reason=reason).inc()
        self._metrics.counter(specs.GATEWAY_MIGRATED_TOKENS, model=model).inc(num_tokens)

    def stream_broke(self, model: str, reason: str) -> None:
        self._metrics.counter(specs.GATEWAY_BROKEN_STREAMS, model=model, reason=reason).inc()

    def redis_up(self, up: bool) -> None:
        self._metrics.gauge(specs.GATEWAY_REDIS_UP).set(int(up))

    def render(self, brain: LocalBrain, *, ready: bool, current: bool, body_bytes: int, journal_tokens: int) -> bytes:
        """The text of a scrape, gauges brought up to date."""
        self._metrics.gauge(specs.GATEWAY_READY).set(int(ready))
        self._metrics.gauge(specs.GATEWAY_CATALOG_CURRENT).set(int(current))
        self._metrics.gauge(specs.GATEWAY_BODY_BYTES).set(body_bytes)
        self._metrics.gauge(specs.GATEWAY_JOURNAL_TOKENS).set(journal_tokens)
        deployments = brain.registry.deployments.values()
        self._metrics.gauge(specs.GATEWAY_CATALOG_MODELS).set(len({each.model.name for each in deployments}))
        phases = dict.fromkeys(((model, phase) for model in self._models for phase in PHASES), 0)
        self._models = {deployment.model.name for deployment in deployments}
        phases.update(dict.fromkeys(((model, phase) for model in self._models for phase in PHASES), 0))
        self._render_queues(brain)
        endpoints: set[tuple[str, str]] = set()
        for deployment in deployments:
            model = deployment.model.name
            for record in deployment.records:
                phases[model, brain.phase(record)] += 1
                endpoints.add((model, record.endpoint.id))
                labels = {"model": model, "endpoint": record.endpoint.id}
                self._metrics.gauge(specs.GATEWAY_ENDPOINT_IN_FLIGHT, **labels).set(record.in_flight)
                self._metrics.gauge(specs.GATEWAY_RESERVED_BLOCKS, **labels).set(record.reserved.num_blocks)
                age_s = brain.state_age_s(record)
                if age_s is not None:
                    self._metrics.gauge(specs.GATEWAY_STATE_AGE_SECONDS, **labels).set(age_s)
        for (model, phase), count in phases.items():
            self._metrics.gauge(specs.GATEWAY_ENDPOINTS, model=model, phase=phase).set(count)
        self._forget(self._endpoints - endpoints)
        self._endpoints = endpoints
        return self._metrics.render()

    def _render_queues(self, brain: LocalBrain) -> None:
        """Deployments that share a name share its series."""
        waiting = {model: [QueueState()] for model in self._models | self._queued_models}
        self._queued_models = set(self._models)
        ended: dict[tuple[str, str], int] = {}
        for deployment in brain.registry.deployments.values():
            waiting[deployment.model.name].append(brain.queues.state(deployment.key))
            for outcome in OUTCOMES:
                total = brain.queues.outcomes[deployment.key, outcome]
                before = self._ended.get((deployment.key, outcome), 0)
                ended[deployment.key, outcome] = total
                labels = {"model": deployment.model.name, "outcome": outcome}
                self._metrics.counter(specs.GATEWAY_QUEUE_ENDED, **labels).inc(max(0, total - before))
        self._ended = ended
        for model, states in waiting.items():
            requests, sizes, _, ages = zip(*states, strict=True)
            self._metrics.gauge(specs.GATEWAY_QUEUE_REQUESTS, model=model).set(sum(requests))
            self._metrics.gauge(specs.GATEWAY_QUEUE_BYTES, model=model).set(sum(sizes))
            self._metrics.gauge(specs.GATEWAY_QUEUE_OLDEST_SECONDS, model=model).set(max(ages))

    def _forget(self, gone: set[tuple[str, str]]) -> None:
        for model, endpoint_id in gone:
            for spec in (
                specs.GATEWAY_ENDPOINT_IN_FLIGHT,
                specs.GATEWAY_RESERVED_BLOCKS,
                specs.GATEWAY_STATE_AGE_SECONDS,
            ):
                self._metrics.forget(spec, model=model, endpoint=endpoint_id)
            for outcome in ("served", *get_args(FailureKind)):
                self._metrics.forget(
                    specs.GATEWAY_UPSTREAM_ATTEMPTS, model=model, endpoint=endpoint_id, outcome=outcome
                )

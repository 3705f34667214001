"""The metrics of one worker's requests.

At a scrape, the control process adds up the metrics of all workers (`metrics.control_process`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from pagemill_gateway.metrics.beginnings import ALL_MODELS, NO_TENANT, of_caller
from pagemill_gateway.metrics.departed import Departed
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol import metrics as specs
from pagemill_protocol.report.outcomes import COUNTED
from pagemill_routing.brain.interface import Assignment, FailureKind
from pagemill_servers.keys.caller import Caller


class WorkerMetrics:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = specs.Metrics(specs.GATEWAY_METRICS)
        self._tenants: dict[str, set[tuple[specs.MetricSpec, tuple[tuple[str, str], ...]]]] = {}
        """The series of each tenant, by metric and other labels."""
        self._begun: set[Caller] = set()
        self._gone_tenants = Departed(clock)

    def prepared(self, record: RequestRecord) -> None:
        self._metrics.gauge(specs.GATEWAY_IN_FLIGHT, model=record.model).inc()
        self._metrics.histogram(specs.GATEWAY_PREPARE_SECONDS, model=record.model).observe(record.prepare_s or 0.0)

    def finished(self, record: RequestRecord) -> None:
        """Count a request at its end, whether or not it was served."""
        model, variant, outcome = record.model, record.deployment, record.outcome
        stream = "true" if record.stream else "false"
        self._metrics.counter(
            specs.GATEWAY_REQUESTS,
            model=model,
            variant=variant,
            route=record.route,
            status=str(record.status),
            stream=stream,
            outcome=outcome,
        ).inc()
        if model:
            self._metrics.counter(specs.GATEWAY_OUTCOMES, model=model, stream=stream, outcome=outcome).inc()
        if record.tenant:
            self._of_tenant(specs.GATEWAY_TENANT_REQUESTS, record.tenant, outcome=outcome)
            if record.allowed_failures is not None and outcome in COUNTED:
                self._of_tenant(specs.GATEWAY_TENANT_ERROR_BUDGET, record.tenant, record.allowed_failures)
        if outcome not in ("completed", "client_left") and not record.attempts:
            self._metrics.counter(specs.GATEWAY_REJECTED, code=record.error_code or str(record.status)).inc()
        if outcome == "failed_after_first_token":
            reason = (record.last_failure if record.has_broken_off else record.error_code) or "broken"
            self._metrics.counter(specs.GATEWAY_BROKEN_STREAMS, model=model, reason=reason).inc()
        if record.prepare_s is None:
            return
        self._metrics.gauge(specs.GATEWAY_IN_FLIGHT, model=model).dec()
        duration = self._metrics.histogram(specs.GATEWAY_REQUEST_SECONDS, model=model, variant=variant)
        duration.observe(record.duration_s())
        if record.stream and record.ttft_s is not None:
            ttft = self._metrics.histogram(specs.GATEWAY_TTFT_SECONDS, model=model, variant=variant)
            ttft.observe(record.ttft_s)
        usage = record.usage
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            self._metrics.counter(specs.GATEWAY_TOKENS, model=model, variant=variant, kind=kind).inc(tokens)
            if record.adapter:
                of_adapter = {"model": model, "adapter": record.adapter}
                self._metrics.counter(specs.GATEWAY_ADAPTER_TOKENS, **of_adapter, kind=kind).inc(tokens)
        if record.adapter:
            of_adapter = {"model": model, "adapter": record.adapter}
            self._metrics.counter(specs.GATEWAY_ADAPTER_REQUESTS, **of_adapter, outcome=outcome).inc()

    def routed(self, model: str, assignment: Assignment, seconds: float) -> None:
        self._metrics.histogram(specs.GATEWAY_ROUTING_SECONDS, model=model).observe(seconds)
        basis = "reported" if assignment.believed else "own_counts"
        self._metrics.counter(specs.GATEWAY_ROUTING_DECISIONS, model=model, policy=assignment.policy, basis=basis).inc()

    def first_token(self, model: str, assignment: Assignment, seconds: float) -> None:
        """Compare the TTFT of a stream, from sending the request to the engine, with the one that routing compared."""
        if assignment.predicted_ttft_ms is not None and seconds > 0:
            error = abs(assignment.predicted_ttft_ms / 1000 - seconds) / seconds
            self._metrics.histogram(specs.GATEWAY_TTFT_ERROR, model=model).observe(error)

    def cached(self, model: str, assignment: Assignment, num_cached_tokens: int) -> None:
        """Compare the cached tokens that the engine found with the prediction."""
        missed = num_cached_tokens - assignment.predicted_cached_tokens
        outcome = "under" if missed >= max(1, assignment.prefix_chunk_tokens) else "over" if missed < 0 else "exact"
        self._metrics.counter(specs.GATEWAY_CACHED_PREDICTIONS, model=model, outcome=outcome).inc()
        if outcome != "exact":
            self._metrics.counter(specs.GATEWAY_CACHED_ERROR_TOKENS, model=model).inc(abs(missed))

    def queued(self, model: str, seconds: float) -> None:
        """Observe the waiting time of a request that got its engine."""
        self._metrics.histogram(specs.GATEWAY_QUEUE_SECONDS, model=model).observe(seconds)

    def attempt(self, model: str, outcome: str) -> None:
        self._metrics.counter(specs.GATEWAY_UPSTREAM_ATTEMPTS, model=model, outcome=outcome).inc()

    def retry(self, model: str, reason: FailureKind) -> None:
        self._metrics.counter(specs.GATEWAY_UPSTREAM_RETRIES, model=model, reason=reason).inc()

    def limited(self, tenant: str, reason: str, model: str) -> None:
        """Count a refusal. `model`: whose limit it was; empty: the key's."""
        self._of_tenant(specs.GATEWAY_LIMITED, tenant, reason=reason, model=model or ALL_MODELS)

    def ended_by_limit(self, model: str) -> None:
        self._metrics.counter(specs.GATEWAY_ENDED_BY_LIMIT, model=model).inc()

    def reserved(self, seconds: float) -> None:
        self._metrics.histogram(specs.GATEWAY_RESERVE_SECONDS).observe(seconds)

    def tenant_used(self, tenant: str, model: str, prompt: int, completion: int) -> None:
        for kind, tokens in (("prompt", prompt), ("completion", completion)):
            self._of_tenant(specs.GATEWAY_TENANT_TOKENS, tenant, tokens, model=model, kind=kind)

    def _of_tenant(self, spec: specs.MetricSpec, tenant: str, amount: float = 1, **labels: str) -> None:
        self._metrics.counter(spec, tenant=tenant or NO_TENANT, **labels).inc(amount)
        if tenant:
            self._tenants.setdefault(tenant, set()).add((spec, tuple(labels.items())))

    def migrated(self, model: str, reason: FailureKind, num_tokens: int) -> None:
        self._metrics.counter(specs.GATEWAY_MIGRATIONS, model=model, reason=reason).inc()
        self._metrics.counter(specs.GATEWAY_MIGRATED_TOKENS, model=model).inc(num_tokens)

    @property
    def num_updates(self) -> int:
        """A counter that increases with every measurement."""
        return self._metrics.num_updates

    def follow_keys(self, callers: Collection[Caller]) -> None:
        """Begin what is counted for these keys, and drop the series of tenants that have been gone for a while."""
        num_updates = self._metrics.num_updates
        for caller in {
            each for each in callers if each.objective is not None or any(each.declared_limits())
        } - self._begun:
            for spec, labels in of_caller(caller):
                self._of_tenant(spec, caller.tenant, 0, **labels)
            self._begun.add(caller)
        self._metrics.num_updates = num_updates  # nothing was measured
        for tenant in self._gone_tenants.over(self._tenants, {each.tenant for each in callers}):
            for spec, others in self._tenants.pop(tenant):
                self._metrics.forget(spec, tenant=tenant, **dict(others))
        self._begun.intersection_update(callers)

    def samples(self, *, body_bytes: int, journal_tokens: int) -> specs.Samples:
        """Return all current values."""
        num_updates = self._metrics.num_updates
        self._metrics.gauge(specs.GATEWAY_BODY_BYTES).set(body_bytes)
        self._metrics.gauge(specs.GATEWAY_JOURNAL_TOKENS).set(journal_tokens)
        self._metrics.num_updates = num_updates  # setting these gauges is no measurement
        return self._metrics.samples()

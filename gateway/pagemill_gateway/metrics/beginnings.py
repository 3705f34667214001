"""Which series begin at 0 before anything is counted: `rate()` takes the first value of a series for no increase.

`control_process` begins those of models, `worker` those of tenants. Series whose labels have too many values, such as
status codes, names of adapters, and tenants for which nothing is declared, begin with what they count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pagemill_protocol import metrics as specs
from pagemill_protocol.report.outcomes import NO_CAPACITY, Outcome
from pagemill_routing.brain.interface import FailureKind
from pagemill_servers.keys.caller import Caller

NO_TENANT = "-"
"""The label of requests without a tenant; names of tenants begin with a letter or digit."""
ALL_MODELS = "-"
"""The label of limits of a key, which count requests for all models."""
UNKNOWN_MODEL = "unknown"
"""The label of requests that ended before their model was known."""
Series = tuple[specs.MetricSpec, dict[str, tuple[str, ...]]]
FAILURES, OUTCOMES = get_args(FailureKind), get_args(Outcome)
ENDED: Series = (specs.GATEWAY_OUTCOMES, {"stream": ("true", "false"), "outcome": OUTCOMES})
OF_MODEL: tuple[Series, ...] = (
    ENDED,
    (specs.GATEWAY_PREPARE_SECONDS, {}),
    (specs.GATEWAY_ROUTING_SECONDS, {}),
    (specs.GATEWAY_TTFT_ERROR, {}),
    (specs.GATEWAY_QUEUE_SECONDS, {}),
    (specs.GATEWAY_CACHED_PREDICTIONS, {"outcome": ("exact", "over", "under")}),
    (specs.GATEWAY_CACHED_ERROR_TOKENS, {}),
    (specs.GATEWAY_UPSTREAM_ATTEMPTS, {"outcome": ("served", *FAILURES)}),
    (specs.GATEWAY_UPSTREAM_RETRIES, {"reason": FAILURES}),
    (specs.GATEWAY_MIGRATIONS, {"reason": FAILURES}),
    (specs.GATEWAY_MIGRATED_TOKENS, {}),
    (specs.GATEWAY_BROKEN_STREAMS, {"reason": FAILURES}),
    (specs.GATEWAY_ENDED_BY_LIMIT, {}),
    (specs.GATEWAY_TENANT_TOKENS, {"tenant": (NO_TENANT,), "kind": ("prompt", "completion")}),
)
OF_DEPLOYMENT: tuple[Series, ...] = (
    (specs.GATEWAY_REQUEST_SECONDS, {}),
    (specs.GATEWAY_TTFT_SECONDS, {}),
    (specs.GATEWAY_TOKENS, {"kind": ("prompt", "cached", "completion")}),
)
LIMITS = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "concurrency": "concurrency",
    "tokens_per_day": "budget_day",
    "tokens_per_month": "budget_month",
}
"""The reason of a refusal, by the limit of the key."""


def begin_gateway(metrics: specs.Metrics) -> None:
    """Begin what is counted without a model."""
    spec, labels = ENDED
    metrics.begin(spec, model=(UNKNOWN_MODEL,), **labels)
    metrics.begin(specs.GATEWAY_REJECTED, code=sorted(NO_CAPACITY))


def begin_deployment(metrics: specs.Metrics, model: str, variant: str) -> None:
    for spec, labels in OF_MODEL:
        metrics.begin(spec, model=(model,), **labels)
    for spec, labels in OF_DEPLOYMENT:
        metrics.begin(spec, model=(model,), variant=(variant,), **labels)


def of_caller(caller: Caller) -> Iterator[tuple[specs.MetricSpec, dict[str, str]]]:
    """Yield what is counted of the tenant of a key with an objective or limits, by metric and other labels."""
    if caller.objective is not None and caller.tenant:
        yield specs.GATEWAY_TENANT_ERROR_BUDGET, {}
    if caller.tenant:
        for outcome in OUTCOMES:
            yield specs.GATEWAY_TENANT_REQUESTS, {"outcome": outcome}
    for model, limit in caller.declared_limits():
        yield specs.GATEWAY_LIMITED, {"reason": LIMITS[limit], "model": model or ALL_MODELS}

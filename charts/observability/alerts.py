"""The alerts: the fault, its severity, and the page in docs/runbooks that describes what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from observability.rules import (
    CEILING,
    HEADROOM,
    KV_USED,
    MISSED,
    READY,
    SATURATION,
    TENANT_MISSED,
    WAITING,
    WITHOUT_GPUS,
    burn,
    tenant_burn,
)

RUNBOOKS = "docs/runbooks"


class Alert(NamedTuple):
    """One alert; its runbook is the page of its name."""

    name: str
    expr: str
    wait: str
    severity: str
    """critical: page the person on call. warning: look at it during the day."""
    summary: str
    description: str
    needs_operator: bool = False
    """Whether it is about a process that `pagemill up` does not have."""

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}/{self.name}.md"

    def document(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"/runbooks/{self.name}.md",
            },
        }


def _burns(of: Callable[[str], str], *pairs: tuple[float, str, str]) -> str:
    """Return a condition under which both windows of a pair burn that fast: the long one shows that the burn matters,
    the short one that it continues."""
    return " or ".join(f"({of(long)} > {factor} and {of(short)} > {factor})" for factor, long, short in pairs)


def _both(missed: str, least: int, *pairs: tuple[float, str, str]) -> str:
    """Return the condition for models and for tenants with an objective, with at least so many missed requests."""
    of_models = f"(({_burns(burn, *pairs)}) and {MISSED}{missed} >= {least})"
    of_tenants = f"(({_burns(tenant_burn, *pairs)}) and {TENANT_MISSED}{missed} >= {least})"
    return f"{of_models} or {of_tenants}"


LEAST_MISSED = 5
"""With fewer, and few requests, one or two failures would look like a burn."""
SATURATED_NOW = (
    f"(min_over_time({WAITING}[2m]) > 0 and on (model) ({READY} >= on (model) {CEILING} or {WITHOUT_GPUS} > 0))"
)
"""Requests wait without a pause, and no further replica can start."""
WHOSE = "{{ or $labels.model $labels.tenant }}"

ALERTS = [
    Alert(
        "PagemillErrorBudgetBurnsFast",
        _both("6h", LEAST_MISSED, (14.4, "1h", "5m"), (6, "6h", "30m")),
        "1m",
        "critical",
        f"{WHOSE} misses its objective {{{{ $labels.slo }}}} for many requests",
        "Requests use up the error budget of 30 days {{ $value | humanize }} times as fast as allowed.",
    ),
    Alert(
        "PagemillErrorBudgetBurnsSlowly",
        _both("3d", LEAST_MISSED, (3, "1d", "2h"), (1, "3d", "6h")),
        "15m",
        "warning",
        f"{WHOSE} will miss its objective {{{{ $labels.slo }}}} this month",
        "Requests use up the error budget of 30 days {{ $value | humanize }} times as fast as allowed.",
    ),
    Alert(
        "PagemillSaturationSoon",
        f"{SATURATION} < 30 and on (model) {KV_USED} > 0.3 * {CEILING} "
        f"or on (model) (avg_over_time({WAITING}[5m]) > 1 and deriv({WAITING}[5m]) > 0)",
        "5m",
        "warning",
        "{{ $labels.model }} will soon be out of capacity",
        "If the growth of the KV cache in use, or of the queue, continues, even the maximum of replicas does not "
        "suffice.",
    ),
    Alert(
        "PagemillNoHeadroom",
        f"{SATURATED_NOW} or on (model) min_over_time({WAITING}[10m]) > 0 "
        f"or on (model) avg_over_time({HEADROOM}[10m]) < 0.1",
        "30s",
        "critical",
        "{{ $labels.model }} has no capacity for further requests",
        "Requests have waited for minutes without a pause, or less than 10 % of the capacity was free.",
    ),
    Alert(
        "PagemillObjectivesMissing",
        "(sum by (model) (pagemill_gateway_endpoints unless on (job, instance) (pagemill_gateway_catalog_own == 1)) "
        "> 0) unless on (model) "
        "(sum by (model) (pagemill_deployment_error_budget_ratio) and on (model) "
        "sum by (model) (pagemill_deployment_max_replicas))",
        "10m",
        "warning",
        "Prometheus has no objective and no maximum of replicas for {{ $labels.model }}",
        "No error budget of the model can be computed, and no other alert looks at it: the operator is not scraped.",
    ),
    Alert(
        "PagemillRolloutStuck",
        "pagemill_deployment_updated_replicas < pagemill_deployment_desired_replicas",
        "20m",
        "warning",
        "{{ $labels.variant }} has {{ $value }} ready replicas of its current spec, fewer than desired",
        "A rollout or scale-up has not become ready for 20 minutes. The LLMDeployment's conditions name the cause.",
    ),
    Alert(
        "PagemillEngineStateStale",
        'sum by (model) (pagemill_gateway_endpoints{phase="stale"}) > 0',
        "5m",
        "warning",
        "Gateways have no recent state of {{ $value }} engines of {{ $labels.model }}",
        "Gateways route requests to these engines by their own counts alone.",
    ),
    Alert(
        "PagemillPoisonRequests",
        'sum by (model) (increase(pagemill_gateway_poison_probes_total{outcome="blamed"}[30m])) > 0',
        "0m",
        "warning",
        "Requests for {{ $labels.model }} crash the engines that serve them",
        "A request was found to crash engines and is refused from now on. A client may send it on purpose.",
    ),
    Alert(
        "PagemillGatewayDown",
        "absent(pagemill_gateway_ready == 1)",
        "2m",
        "critical",
        "No gateway is ready",
        "No request is answered, or Prometheus cannot reach the gateways.",
    ),
    Alert(
        "PagemillOperatorDown",
        'absent(leader_election_master_status{name="llmdeployment"} == 1)',
        "5m",
        "critical",
        "No operator is the leader",
        "Requests are answered, but nothing is scaled, replaced or rolled out.",
        needs_operator=True,
    ),
]

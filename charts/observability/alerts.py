"""The alerts: the fault, its severity, and the page in docs/runbooks that describes what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

from observability.rules import HEADROOM, SATURATION, burn

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

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}/{self.name}.md"

    def document(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description, "runbook_url": self.runbook},
        }


def _burns(*pairs: tuple[float, str, str]) -> str:
    """Return a condition under which both windows of a pair burn that fast: the long one shows that the burn matters,
    the
    short one that it continues.
    """
    return " or ".join(f"({burn(long)} > {factor} and {burn(short)} > {factor})" for factor, long, short in pairs)


ALERTS = [
    Alert(
        "PagemillErrorBudgetBurnsFast",
        _burns((14.4, "1h", "5m"), (6, "6h", "30m")),
        "2m",
        "critical",
        "{{ $labels.model }} misses its {{ $labels.slo }} objective for many requests",
        "Requests use up the error budget of 30 days {{ $value | humanize }} times as fast as allowed.",
    ),
    Alert(
        "PagemillErrorBudgetBurnsSlowly",
        _burns((3, "1d", "2h"), (1, "3d", "6h")),
        "15m",
        "warning",
        "{{ $labels.model }} will miss its {{ $labels.slo }} objective this month",
        "Requests use up the error budget of 30 days {{ $value | humanize }} times as fast as allowed.",
    ),
    Alert(
        "PagemillSaturationSoon",
        f"{SATURATION} < 30 and on (model) {HEADROOM} < 0.7",
        "5m",
        "warning",
        "{{ $labels.model }} will have no free KV cache in {{ $value | humanize }} minutes",
        "If the trend of the last 30 minutes continues, even the autoscaler's maximum of replicas does not suffice.",
    ),
    Alert(
        "PagemillNoHeadroom",
        f"{HEADROOM} < 0.1",
        "10m",
        "critical",
        "{{ $labels.model }} has {{ $value | humanizePercentage }} of its capacity free",
        "New requests wait for KV cache or for a sequence slot.",
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
    ),
]

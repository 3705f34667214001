"""The alerts: what is wrong, how urgent, and the page in docs/runbooks that says what to do."""

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
    """critical: a person is called. warning: a person looks during the day."""
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
    """Both windows of a pair burn so fast: the long one shows that it matters, the short one that it goes on."""
    return " or ".join(f"({burn(long)} > {factor} and {burn(short)} > {factor})" for factor, long, short in pairs)


ALERTS = [
    Alert(
        "PagemillErrorBudgetBurnsFast",
        _burns((14.4, "1h", "5m"), (6, "6h", "30m")),
        "2m",
        "critical",
        "{{ $labels.model }} misses its {{ $labels.slo }} objective for many requests",
        "The error budget of 30 days is used up {{ $value | humanize }} times as fast as allowed.",
    ),
    Alert(
        "PagemillErrorBudgetBurnsSlowly",
        _burns((3, "1d", "2h"), (1, "3d", "6h")),
        "15m",
        "warning",
        "{{ $labels.model }} will miss its {{ $labels.slo }} objective this month",
        "The error budget of 30 days is used up {{ $value | humanize }} times as fast as allowed.",
    ),
    Alert(
        "PagemillSaturationSoon",
        f"{SATURATION} < 30 and on (model) {HEADROOM} < 0.7",
        "5m",
        "warning",
        "{{ $labels.model }} will have no free KV cache in {{ $value | humanize }} minutes",
        "At the trend of the last 30 minutes, even the most replicas that the autoscaler may reach do not suffice.",
    ),
    Alert(
        "PagemillNoHeadroom",
        f"{HEADROOM} < 0.1",
        "10m",
        "critical",
        "{{ $labels.model }} has {{ $value | humanizePercentage }} of its capacity free",
        "New requests wait for KV cache or for a place in the batch.",
    ),
    Alert(
        "PagemillRolloutStuck",
        "pagemill_deployment_updated_replicas < pagemill_deployment_desired_replicas",
        "20m",
        "warning",
        "{{ $labels.variant }} has {{ $value }} ready replicas of its present spec, fewer than it wants",
        "A rollout or a scale-up has not become ready for 20 minutes. Conditions of the LLMDeployment name the cause.",
    ),
    Alert(
        "PagemillEngineStateStale",
        'sum by (model) (pagemill_gateway_endpoints{phase="stale"}) > 0',
        "5m",
        "warning",
        "Gateways have no fresh state of {{ $value }} engines of {{ $labels.model }}",
        "Requests are routed to these engines by the gateway's own counts alone.",
    ),
    Alert(
        "PagemillPoisonRequests",
        'sum by (model) (increase(pagemill_gateway_poison_probes_total{outcome="blamed"}[30m])) > 0',
        "0m",
        "warning",
        "Requests for {{ $labels.model }} end the engines that serve them",
        "A request was found to end engines and is refused from now on. It may be sent on purpose.",
    ),
    Alert(
        "PagemillGatewayDown",
        "absent(pagemill_gateway_ready == 1)",
        "2m",
        "critical",
        "No gateway is ready",
        "No request is answered, or Prometheus does not reach the gateways.",
    ),
    Alert(
        "PagemillOperatorDown",
        'absent(leader_election_master_status{name="llmdeployment"} == 1)',
        "5m",
        "critical",
        "No operator leads",
        "Requests are answered, but nothing is scaled, replaced or rolled out.",
    ),
]

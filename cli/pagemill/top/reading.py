"""Parses one engine's metrics and computes a row of the table from two readings.

`sources` fetches the metrics' text and `display` shows the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from pagemill_protocol import metrics
from pagemill_protocol.metrics import MetricSpec


@dataclass(frozen=True)
class Reading:
    """The metrics of one pod at one moment."""

    pod: str
    deployment: str
    """`namespace/name`."""
    at_s: float
    text: str = ""
    fault: str = ""
    """The cause, if the pod's metrics could not be read."""
    phase: str = "unreachable"
    """The pod's phase in that case."""
    values: dict[str, float] = field(init=False)
    """For each metric's exported name, the sum of its series."""
    model: str = field(init=False)
    ranks: str = field(init=False)

    def __post_init__(self) -> None:
        values: dict[str, float] = {}
        model = ranks = ""
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
                model = sample.labels.get("model_name", model)
                if sample.name == metrics.ENGINE_INFO.exported_name:
                    ranks = _ranks(sample.labels)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "ranks", ranks)

    def __getitem__(self, spec: MetricSpec) -> float | None:
        return self.values.get(spec.exported_name)


@dataclass(frozen=True)
class PodRow:
    """One pod's line of the table; `None` stands for unknown values."""

    deployment: str
    pod: str
    model: str
    phase: str
    """ready, starting, sleeping, draining, unreachable, or pending: no node has room for it."""
    kv: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    running: float | None = None
    waiting: float | None = None
    tokens_per_s: float | None = None
    """Generated tokens per second between the readings."""
    ttft_ms: float | None = None
    """Mean time to first token between the readings, from the request's arrival at the engine."""
    accepted: float | None = None
    """Share of the proposed tokens that were sampled between the readings; none were proposed: unknown."""
    fault: str = ""
    ranks: str = ""
    """The processes that compute the model together, such as `4 ranks on 2 nodes`; empty: one."""


@dataclass(frozen=True)
class ClientsView:
    """What clients of a gateway see."""

    waiting: float
    """Requests that wait in gateways until an engine has capacity."""
    ttft_ms: float | None
    """Mean time to first token between the readings, from the request's arrival at the gateway; None: no stream
    began."""


def clients_of(before: Reading | None, now: Reading) -> ClientsView | None:
    """Return what clients of a gateway see; None if it does not respond."""
    if now.fault:
        return None
    ttft_ms = None
    first = metrics.GATEWAY_TTFT_SECONDS.name
    if before is not None and not before.fault and (count := _increase(before, now, f"{first}_count")):
        ttft_ms = 1000 * _increase(before, now, f"{first}_sum") / count
    return ClientsView(now[metrics.GATEWAY_QUEUE_REQUESTS] or 0.0, ttft_ms)


def row_of(before: Reading | None, now: Reading) -> PodRow:
    """Return the pod's row. `before` is the pod's previous reading, if there is one."""
    if now.fault:
        return PodRow(now.deployment, now.pod, "", now.phase, fault=now.fault)
    tokens = ttft_ms = accepted = None
    if before is not None and not before.fault and now.at_s > before.at_s:
        generated = _increase(before, now, metrics.GENERATION_TOKENS.exported_name)
        tokens = generated / (now.at_s - before.at_s)
        first = metrics.TIME_TO_FIRST_TOKEN.name
        if count := _increase(before, now, f"{first}_count"):
            ttft_ms = 1000 * _increase(before, now, f"{first}_sum") / count
        if proposed := _increase(before, now, metrics.SPEC_DRAFT_TOKENS.exported_name):
            accepted = _increase(before, now, metrics.SPEC_ACCEPTED.exported_name) / proposed
    return PodRow(
        deployment=now.deployment,
        pod=now.pod,
        model=now.model,
        phase=_phase(now),
        kv=now[metrics.KV_CACHE_USAGE],
        running=now[metrics.NUM_REQUESTS_RUNNING],
        waiting=now[metrics.NUM_REQUESTS_WAITING],
        tokens_per_s=tokens,
        ttft_ms=ttft_ms,
        accepted=accepted,
        ranks=now.ranks,
    )


def _ranks(labels: dict[str, str]) -> str:
    """Return how many processes compute the model, if there are several; engines of earlier versions do not say it."""
    ranks, nodes = labels.get("ranks", "1"), labels.get("nodes", "1")
    if ranks == "1":
        return ""
    return f"{ranks} ranks" if nodes == "1" else f"{ranks} ranks on {nodes} nodes"


def _increase(before: Reading, now: Reading, name: str) -> float:
    """Return the counter's increase. A counter that went down began at 0 again, because the engine was restarted."""
    old, new = before.values.get(name, 0.0), now.values.get(name, 0.0)
    return new - old if new >= old else new


def _phase(reading: Reading) -> str:
    for spec, name in ((metrics.ENGINE_SLEEPING, "sleeping"), (metrics.ENGINE_DRAINING, "draining")):
        if reading[spec]:
            return name
    return "ready" if reading[metrics.ENGINE_READY] else "starting"

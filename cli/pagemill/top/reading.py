"""One engine's metrics as numbers, and what two readings say about the time between them.

Knows neither terminal nor cluster: `sources` fetches the text, `table` shows the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from pagemill_protocol import metrics
from pagemill_protocol.metrics import MetricSpec


@dataclass(frozen=True)
class Reading:
    """What one pod answered at one moment."""

    pod: str
    deployment: str
    """`namespace/name`."""
    at_s: float
    text: str = ""
    fault: str = ""
    """Why there is no text."""
    values: dict[str, float] = field(init=False)
    """Sums of the series of each exported name."""
    model: str = field(init=False)

    def __post_init__(self) -> None:
        values: dict[str, float] = {}
        model = ""
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
                model = sample.labels.get("model_name", model)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "model", model)

    def __getitem__(self, spec: MetricSpec) -> float | None:
        return self.values.get(spec.exported_name)


@dataclass(frozen=True)
class Row:
    """One pod between two readings; `None`: not known."""

    deployment: str
    pod: str
    model: str
    phase: str
    """ready, starting, sleeping, draining or unreachable."""
    kv: float | None = None
    """Share of the KV cache that requests hold."""
    running: float | None = None
    waiting: float | None = None
    tokens_per_s: float | None = None
    """Generated."""
    ttft_ms: float | None = None
    """Mean of the first tokens in between, from the request's arrival at the engine."""
    fault: str = ""


def row_of(before: Reading | None, now: Reading) -> Row:
    """`before`: the same pod's, if it was read."""
    if now.fault:
        return Row(now.deployment, now.pod, "", "unreachable", fault=now.fault)
    tokens = ttft_ms = None
    if before is not None and not before.fault and now.at_s > before.at_s:
        generated = _increase(before, now, metrics.GENERATION_TOKENS.exported_name)
        tokens = generated / (now.at_s - before.at_s)
        first = metrics.TIME_TO_FIRST_TOKEN.name
        if count := _increase(before, now, f"{first}_count"):
            ttft_ms = 1000 * _increase(before, now, f"{first}_sum") / count
    return Row(
        deployment=now.deployment,
        pod=now.pod,
        model=now.model,
        phase=_phase(now),
        kv=now[metrics.KV_CACHE_USAGE],
        running=now[metrics.NUM_REQUESTS_RUNNING],
        waiting=now[metrics.NUM_REQUESTS_WAITING],
        tokens_per_s=tokens,
        ttft_ms=ttft_ms,
    )


def _increase(before: Reading, now: Reading, name: str) -> float:
    """An engine that was restarted counts from 0 again."""
    old, new = before.values.get(name, 0.0), now.values.get(name, 0.0)
    return new - old if new >= old else new


def _phase(reading: Reading) -> str:
    for spec, name in ((metrics.ENGINE_SLEEPING, "sleeping"), (metrics.ENGINE_DRAINING, "draining")):
        if reading[spec]:
            return name
    return "ready" if reading[metrics.ENGINE_READY] else "starting"

"""The autoscaler of all deployments: keeps their memories, asks `decide`, and remembers what it decided and why.

It neither reads the load stream nor writes replicas: whoever runs it gives it the signals and does what it says. Time
comes from outside. One thread, one event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pagemill_operator.autoscaler.cold_start import ColdStarts
from pagemill_operator.autoscaler.decide import decide
from pagemill_operator.autoscaler.decision import Decision, Record
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.policy import Policy
from pagemill_operator.autoscaler.signals import Fleet, Signals, View, merge
from pagemill_operator.status.observation import Observation, Scaling
from pagemill_protocol.histogram import Histogram

REMEMBERED = 64
"""Records of a deployment: of changes, and of new reasons to change nothing."""
PATIENCE_S = 5.0
"""What is missing for less is not told: streams are opened anew, and a new leader has heard nobody at first."""
LEAST_SAMPLES = 10
"""Of latencies: fewer tell nothing about an SLO."""


@dataclass(slots=True)
class _Scaled:
    """One deployment."""

    wanted: int
    memory: Memory = field(default_factory=Memory)
    cold_starts: ColdStarts = field(default_factory=ColdStarts)
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    policy: Policy | None = None
    signals: Signals | None = None
    decision: Decision | None = None
    missing_since_s: float | None = None
    """None: nothing is missing."""
    silent: bool = False
    """Something has been missing for so long that people are told."""
    was_whole: bool = False
    """Once nothing was missing."""
    changed: Decision | None = None
    """The latest one that changed the number."""


class Scaler:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock = clock
        self._now = now
        self._scaled: dict[str, _Scaled] = {}

    def wanted(self, key: str, start: int, policy: Policy | None) -> int:
        """Replicas that are to be there: `start` as long as nothing was decided, or where nobody decides."""
        if policy is None or policy.mode != "Active":
            return start
        scaled = self._scaled.get(key)
        return policy.clamp(start if scaled is None else scaled.wanted)

    def keep(self, keys: Iterable[str]) -> set[str]:
        """Forget all deployments but these; returns those that were forgotten."""
        gone = self._scaled.keys() - set(keys)
        for key in gone:
            del self._scaled[key]
        return gone

    def decide(
        self, key: str, policy: Policy, seen: Observation, views: Sequence[View], *, start: int, num_gateways: int
    ) -> Record | None:
        """Decide now. The record, where something changed or a new reason keeps it from changing.

        `start`: the replicas that are wanted as far as nothing was decided here yet.
        """
        scaled = self._scaled.setdefault(key, _Scaled(policy.clamp(start) if policy.mode == "Active" else start))
        if policy.mode != "Active":
            scaled.wanted = start
        now = self._clock()
        scaled.cold_starts.saw(seen.current(), now)
        fleet = _fleet(scaled, seen, now)
        signals = merge(views, fleet, num_gateways=num_gateways, at_s=now)
        before = scaled.memory
        decision, scaled.memory = decide(policy, signals, before)
        record = Record(key, self._now().strftime("%Y-%m-%dT%H:%M:%SZ"), policy, signals, before, decision)
        was_silent = scaled.silent
        _note_missing(scaled, decision, now)
        is_news = scaled.decision is None or _news(scaled.decision) != _news(decision) or was_silent != scaled.silent
        scaled.policy, scaled.signals, scaled.decision = policy, signals, decision
        if policy.mode == "Active":
            scaled.wanted = decision.replicas
        if decision.changes:
            scaled.changed = decision
        if not is_news and not (decision.changes and policy.mode == "Active"):
            return None
        scaled.records.append(record)
        return record

    def records(self, keys: Iterable[str] = ()) -> list[Record]:
        """Of these deployments, or of all; oldest first."""
        wanted = set(keys) or set(self._scaled)
        records = [record for key in wanted if key in self._scaled for record in self._scaled[key].records]
        return sorted(records, key=lambda record: record.signals.at_s)

    def state(self, key: str) -> Scaling | None:
        """For conditions; None while nothing was decided, or too little is known for a decision yet."""
        scaled = self._scaled.get(key)
        if scaled is None or scaled.decision is None or scaled.policy is None:
            return None
        if not scaled.was_whole and not scaled.silent:
            return None
        decision, policy = scaled.decision, scaled.policy
        slo_met, slo_message = _slo_met(scaled)
        return Scaling(
            active=not scaled.silent,
            advisory=policy.mode == "Advisory",
            message=_condition_message(policy, decision, silent=scaled.silent),
            why=scaled.changed.message if scaled.changed is not None else "",
            slo_met=slo_met,
            slo_reachable=not decision.unreachable,
            slo_message=slo_message,
        )


def _note_missing(scaled: _Scaled, decision: Decision, now: float) -> None:
    if not decision.missing:
        scaled.missing_since_s, scaled.silent, scaled.was_whole = None, False, True
        return
    if scaled.missing_since_s is None:
        scaled.missing_since_s = now
    scaled.silent = scaled.silent or now - scaled.missing_since_s >= PATIENCE_S


def _news(decision: Decision) -> tuple[object, ...]:
    """Without the numbers, and without the wish to remove something soon, which come and go all the time."""
    reason = "Steady" if decision.reason == "Stabilizing" else decision.reason
    return reason, decision.replicas, decision.missing, bool(decision.unreachable)


def _fleet(scaled: _Scaled, seen: Observation, now: float) -> Fleet:
    phases = [replica.phase for replica in seen.current()]
    return Fleet(
        wanted=scaled.wanted,
        ready=phases.count("ready"),
        loading=sum(phases.count(phase) for phase in ("starting", "loading", "waking", "crashed")),
        pending=phases.count("pending"),
        asleep=phases.count("asleep"),
        starting_s=scaled.cold_starts.oldest_s(now),
        cold_start_s=scaled.cold_starts.learned_s,
    )


def _condition_message(policy: Policy, decision: Decision, *, silent: bool) -> str:
    """Without what changes by itself."""
    if silent:
        return f"{'; '.join(decision.missing)}: nothing is removed until that is known"
    if policy.mode == "Advisory":
        return f"{decision.replicas} replicas are advised; spec.replicas decides"
    return f"between {policy.lowest} and {policy.max_replicas} replicas follow the load"


def _slo_met(scaled: _Scaled) -> tuple[bool | None, str]:
    """By what clients saw in the last minute; what cannot be reached is said as well."""
    policy, signals, decision = scaled.policy, scaled.signals, scaled.decision
    if policy is None or policy.slo is None or signals is None or decision is None:
        return None, ""
    slo, latencies = policy.slo, signals.latencies
    faults = [
        f"{name} of {slo.share:.0%} of the requests is over {limit_ms:.0f} ms"
        for name, limit_ms, histogram in (
            ("ttft", slo.ttft_ms, latencies.ttft_ms),
            ("tpot", slo.tpot_ms, latencies.tpot_ms),
        )
        if limit_ms is not None and _exceeds(histogram, slo.share, limit_ms)
    ]
    message = "; ".join(filter(None, [*faults, decision.unreachable]))
    if faults or decision.unreachable:
        return False, message
    return (True, "") if latencies.ttft_ms.total >= LEAST_SAMPLES else (None, "")


def _exceeds(histogram: Histogram, share: float, limit_ms: float) -> bool:
    value = histogram.quantile(share)
    # A bin is wide: only what is beyond it counts.
    return histogram.total >= LEAST_SAMPLES and value is not None and value > limit_ms * 1.05

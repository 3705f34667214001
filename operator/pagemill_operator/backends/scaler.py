"""The autoscaler of all deployments: keeps their memories, asks their scaling policies, and records the decisions.

It neither reads the load stream nor writes replicas: its caller passes observations in and carries decisions out. Time
is injected. It runs in one thread and one event loop. `autoscaler` has the policies; the callers are
`controller.scaling` in a cluster and `backends.local.scaling` on one machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.policy import ScalingPolicy, ask
from pagemill_operator.autoscaler.records import Record
from pagemill_operator.autoscaler.registry import find_policy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Activity, Fleet, GatewayReport, Signals, merge
from pagemill_operator.backends.start_durations import StartDurations
from pagemill_operator.status.observation import Observation, ScalingState
from pagemill_protocol.report.histogram import Histogram

NUM_KEPT_RECORDS = 64
"""Number of records kept per deployment: of changes, and of new reasons to change nothing."""
PATIENCE_S = 5.0
"""Seconds that a signal may be missing before that is reported: streams reconnect, and a new leader starts without any.
"""
LEAST_SAMPLES = 10
"""Least number of latencies from which an SLO is judged."""


@dataclass(slots=True)
class _Scaled:
    """The state of one deployment."""

    wanted: int
    policy: ScalingPolicy[Any]
    memory: Any
    """The policy's memory."""
    starts: StartDurations = field(default_factory=StartDurations)
    activity: Activity = field(default_factory=Activity)
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_RECORDS))
    settings: ScalingSettings | None = None
    signals: Signals | None = None
    decision: Decision | None = None
    missing_since_s: float | None = None
    """Clock time since which a signal is missing; None if none is."""
    missing_is_reported: bool = False
    """Whether a signal has been missing for so long that a condition reports it."""
    was_whole: bool = False
    """Whether all signals were present at least once."""
    latest: Record | None = None
    """The record of the latest decision, stored or not."""
    changed: Decision | None = None
    """The latest decision that changed the number of replicas."""


class Scaler:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock = clock
        self._now = now
        self._scaled: dict[str, _Scaled] = {}

    def wanted(self, key: str, start: int, settings: ScalingSettings | None) -> int:
        """Return the wanted replicas; `start` before the first decision, or if the autoscaler is not in mode Active."""
        if settings is None or settings.mode != "Active":
            return start
        scaled = self._scaled.get(key)
        return settings.clamp(start if scaled is None else scaled.wanted)

    def keep(self, keys: Iterable[str]) -> set[str]:
        """Forget all deployments but these; return the forgotten keys."""
        gone = self._scaled.keys() - set(keys)
        for key in gone:
            del self._scaled[key]
        return gone

    def decide(
        self,
        key: str,
        settings: ScalingSettings,
        seen: Observation,
        reports: Sequence[GatewayReport],
        *,
        start: int,
        num_gateways: int,
    ) -> Record | None:
        """Decide now; return the record if something changed or has a new reason not to, else None.

        `start` is the number of replicas to begin with before the first decision. Raise `UnknownPolicyError`.
        """
        scaled = self._of(key, settings, start)
        now = self._clock()
        scaled.starts.observe(seen.current(), now)
        scaled.starts.reported(start for report in reports for start in report.load.starts)
        merged = merge(
            reports,
            _fleet(scaled, seen, now),
            num_gateways=num_gateways,
            at_s=now,
            has_replicas=scaled.policy.sees_replicas,
        )
        signals = scaled.activity.seen(merged)
        before = scaled.memory
        decision, scaled.memory = ask(scaled.policy, settings, signals, before)
        record = Record(key, self._now().strftime("%Y-%m-%dT%H:%M:%SZ"), settings, signals, before, decision)
        scaled.latest = record
        return record if self._store(scaled, record) else None

    def _of(self, key: str, settings: ScalingSettings, start: int) -> _Scaled:
        """Return the deployment's state; a change of the policy starts with an empty memory."""
        policy = find_policy(settings.policy)
        scaled = self._scaled.get(key)
        if scaled is None:
            first = settings.clamp(start) if settings.mode == "Active" else start
            scaled = self._scaled[key] = _Scaled(first, policy, policy.memory_type())
        if scaled.policy is not policy:
            scaled.policy, scaled.memory = policy, policy.memory_type()
        if settings.mode != "Active":
            scaled.wanted = start
        return scaled

    def _store(self, scaled: _Scaled, record: Record) -> bool:
        """Store the decision; return whether it is worth a record."""
        settings, signals, decision = record.settings, record.signals, record.decision
        was_missing = scaled.missing_is_reported
        _note_missing(scaled, decision, signals.at_s)
        is_recorded = scaled.decision is None or _recorded_parts(scaled.decision) != _recorded_parts(decision)
        is_recorded = is_recorded or was_missing != scaled.missing_is_reported
        is_recorded = is_recorded or (decision.changes and settings.mode == "Active")
        scaled.settings, scaled.signals, scaled.decision = settings, signals, decision
        if settings.mode == "Active":
            scaled.wanted = decision.replicas
        if decision.changes:
            scaled.changed = decision
        if is_recorded:
            scaled.records.append(record)
        return is_recorded

    def records(self, keys: Iterable[str] = ()) -> list[Record]:
        """Return the records of these deployments, or of all without `keys`; oldest first.

        The last one of each is that of its latest decision, so that its inputs are the present ones.
        """
        wanted = set(keys) or set(self._scaled)
        found = [self._scaled[key] for key in wanted if key in self._scaled]
        records = [record for scaled in found for record in scaled.records]
        records += [
            each.latest
            for each in found
            if each.latest is not None and (not each.records or each.records[-1] is not each.latest)
        ]
        return sorted(records, key=lambda record: record.signals.at_s)

    def decision(self, key: str) -> Decision | None:
        """Return the latest decision; None before the first one."""
        scaled = self._scaled.get(key)
        return scaled.decision if scaled is not None else None

    def state(self, key: str) -> ScalingState | None:
        """Return the state for conditions, or None before a decision or while too little is known for one."""
        scaled = self._scaled.get(key)
        if scaled is None or scaled.decision is None or scaled.settings is None:
            return None
        if not scaled.was_whole and not scaled.missing_is_reported:
            return None
        decision, settings = scaled.decision, scaled.settings
        slo_met, slo_message = _slo_met(scaled)
        return ScalingState(
            active=not scaled.missing_is_reported,
            advisory=settings.mode == "Advisory",
            message=_condition_message(settings, decision, is_missing=scaled.missing_is_reported),
            why=scaled.changed.message if scaled.changed is not None else "",
            slo_met=slo_met,
            slo_reachable=not decision.unreachable,
            slo_message=slo_message,
        )


def _note_missing(scaled: _Scaled, decision: Decision, now: float) -> None:
    if not decision.missing:
        scaled.missing_since_s, scaled.missing_is_reported, scaled.was_whole = None, False, True
        return
    if scaled.missing_since_s is None:
        scaled.missing_since_s = now
    scaled.missing_is_reported = scaled.missing_is_reported or now - scaled.missing_since_s >= PATIENCE_S


def _recorded_parts(decision: Decision) -> tuple[object, ...]:
    """Return the parts of a decision whose change is recorded: no measured numbers and no pending removals."""
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
        starting_s=scaled.starts.oldest_s(now),
        cold_start_s=scaled.starts.learned_s,
    )


def _condition_message(settings: ScalingSettings, decision: Decision, *, is_missing: bool) -> str:
    """Return the condition's message, without values that change by themselves."""
    if is_missing:
        return f"{'; '.join(decision.missing)}: no replica is removed until that is known"
    if settings.mode == "Advisory":
        return f"the autoscaler recommends {decision.replicas} replicas; in mode Advisory spec.replicas applies"
    return f"the number of replicas follows the load, between {settings.lowest} and {settings.max_replicas}"


def _slo_met(scaled: _Scaled) -> tuple[bool | None, str]:
    """Return whether the SLO was met in the last minute (None: unknown), and what was missed or cannot be reached."""
    settings, signals, decision = scaled.settings, scaled.signals, scaled.decision
    if settings is None or settings.slo is None or signals is None or decision is None:
        return None, ""
    slo, latencies = settings.slo, signals.latencies
    faults = [
        f"fewer than {slo.share:.0%} of the requests have a {name} within {limit_ms:.0f} ms"
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
    # Bins are wide: only a value clearly beyond the limit counts.
    return histogram.total >= LEAST_SAMPLES and value is not None and value > limit_ms * 1.05

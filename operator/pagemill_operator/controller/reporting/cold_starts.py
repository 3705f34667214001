"""Measures cold starts: each pod that became ready under this leader, once, with its engine's own phases.

Times of pod conditions have whole seconds; the engine's phases are exact. `load.store` holds the engines' reports of
their starts; `reconcile` asks for each deployment and shows the latest start in the status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from pagemill_operator.backends.kubernetes.render.names import ENGINE
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.status.observation import LastStart
from pagemill_protocol.report.load import EngineStart
from pagemill_protocol.report.state import WAKE

ENGINE_PHASES = ("load", "warm", "first_token")
PHASES = ("schedule", "pull", "boot", *ENGINE_PHASES, "total")
"""The phases of a start in order, from the pod's creation: until it has a node; until its container runs; until the
engine looks at the model, plus the time from the engine's readiness to the kubelet's next probe; the engine's three.
"""


class ColdStarts:
    def __init__(
        self,
        reported: Callable[[str], Mapping[str, EngineStart]],
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`reported` returns the starts that the engines of a key report, by pod uid."""
        self._reported = reported
        self._metrics = metrics
        self._now = now
        self._since: datetime | None = None
        """Time since which this process leads, in whole seconds as pods' creation times are; earlier pods belong to the
        earlier leader.
        """
        self._measured: dict[str, set[str]] = {}
        """Key -> uids."""
        self._latest: dict[str, LastStart] = {}
        self._wakes: dict[str, dict[str, int]] = {}
        """Key -> uid -> the engine's number of wakes at the last look."""

    def begin(self) -> None:
        """Measure pods that are created from now on: this process leads."""
        self._since = self._now().replace(microsecond=0)

    def measure(self, key: str, pods: Iterable[Manifest]) -> LastStart | None:
        """Measure the pods that have become ready; return the latest known start, or None."""
        engines, by_uid = self._reported(key), {pod["metadata"]["uid"]: pod for pod in pods}
        measured = self._measured[key] = self._measured.get(key, set()) & by_uid.keys()
        self._measure_wakes(key, {uid: engines[uid] for uid in by_uid.keys() & engines.keys()}, by_uid)
        for uid in (by_uid.keys() & engines.keys()) - measured:
            if start := self._start(by_uid[uid], engines[uid]):
                measured.add(uid)
                self._metrics.started(start.seconds)
                self._latest[key] = max(start, self._latest.get(key, start), key=lambda each: each.time)
        return self._latest.get(key)

    def forget(self, key: str) -> None:
        self._measured.pop(key, None)
        self._latest.pop(key, None)
        self._wakes.pop(key, None)

    def _measure_wakes(self, key: str, engines: Mapping[str, EngineStart], pods: Mapping[str, Manifest]) -> None:
        """Measure each wake once; of several between two looks only the last counts. Wakes under an earlier leader are
        skipped.
        """
        known = self._wakes.get(key, {})
        for uid, engine in engines.items():
            before = known.get(uid, 0 if self._is_ours(pods[uid]) else engine.num_wakes)
            if WAKE in engine.seconds and engine.num_wakes > before:
                self._metrics.started({WAKE: engine.seconds[WAKE]})
        kept = {uid: number for uid, number in known.items() if uid in pods}
        self._wakes[key] = kept | {uid: engine.num_wakes for uid, engine in engines.items()}

    def _start(self, pod: Manifest, engine: EngineStart) -> LastStart | None:
        if not self._is_ours(pod):
            return None
        # An engine that has slept was ready before.
        return start_of(pod, ENGINE, engine.seconds) if not engine.num_wakes else None

    def _is_ours(self, pod: Manifest) -> bool:
        created = pod["metadata"].get("creationTimestamp")
        return bool(created) and self._since is not None and datetime.fromisoformat(created) >= self._since


def start_of(pod: Manifest, main: str, engine: Mapping[str, float]) -> LastStart | None:
    """Return the start of a pod, or None if it is not complete or if the container was restarted: that is no cold
    start.
    """
    created, scheduled = _time(pod["metadata"].get("creationTimestamp")), _since(pod, "PodScheduled")
    containers: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    status = next((each for each in containers if each["name"] == main), {})
    running = _time(status.get("state", {}).get("running", {}).get("startedAt"))
    ready = _since(pod, "Ready")
    if created is None or scheduled is None or running is None or ready is None or status.get("restartCount"):
        return None
    own = {phase: max(0.0, engine.get(phase, 0.0)) for phase in ENGINE_PHASES}
    boot_s = (ready - running).total_seconds() - sum(own.values())
    seconds = {
        "schedule": (scheduled - created).total_seconds(),
        "pull": (running - scheduled).total_seconds(),
        "boot": boot_s,
        **own,
        "total": (ready - created).total_seconds(),
    }
    # A clock that was set back must not give a phase a negative duration.
    return LastStart(
        pod["metadata"]["name"],
        ready.strftime("%Y-%m-%dT%H:%M:%SZ"),
        {phase: round(max(0.0, seconds[phase]), 3) for phase in PHASES},
    )


def _since(pod: Manifest, kind: str) -> datetime | None:
    """Return the time at which the condition became true, or None if it is not true."""
    conditions: list[dict[str, Any]] = pod.get("status", {}).get("conditions") or []
    found = next((each for each in conditions if each["type"] == kind and each["status"] == "True"), {})
    return _time(found.get("lastTransitionTime"))


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None

"""Cold starts as they are measured: each pod that became ready under this leader, once, with its engine's own phases.

Neighbours: `load.store` has what engines told, `backends.kubernetes.observe.start` makes phases of it, `reconcile` asks
for each deployment it looks at and shows the latest start in the status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from pagemill_operator.backends.kubernetes.observe.start import start_of
from pagemill_operator.backends.kubernetes.render.names import ENGINE
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.controller.metrics import OperatorMetrics
from pagemill_operator.status.observation import LastStart
from pagemill_protocol.load import EngineStart
from pagemill_protocol.state import WAKE


class ColdStarts:
    def __init__(
        self,
        told: Callable[[str], Mapping[str, EngineStart]],
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`told`: of a key, what engines told of their starts, by pod's uid."""
        self._told = told
        self._metrics = metrics
        self._now = now
        self._since: datetime | None = None
        """Pods made earlier are the earlier leader's."""
        self._measured: dict[str, set[str]] = {}
        """Key -> uids."""
        self._latest: dict[str, LastStart] = {}
        self._wakes: dict[str, dict[str, int]] = {}
        """Key -> uid -> how often it had woken up when it was looked at last."""

    def look(self, key: str, pods: Iterable[Manifest]) -> LastStart | None:
        """Measure what has become ready; the latest start that is known."""
        self._since = self._since or self._now()
        engines, by_uid = self._told(key), {pod["metadata"]["uid"]: pod for pod in pods}
        measured = self._measured[key] = self._measured.get(key, set()) & by_uid.keys()
        self._look_for_wakes(key, {uid: engines[uid] for uid in by_uid.keys() & engines.keys()}, by_uid)
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

    def _look_for_wakes(self, key: str, engines: Mapping[str, EngineStart], pods: Mapping[str, Manifest]) -> None:
        """Each once; of several between two looks the last counts. Those under an earlier leader were its own."""
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
        # One that has slept was ready before.
        return start_of(pod, ENGINE, engine.seconds) if not engine.num_wakes else None

    def _is_ours(self, pod: Manifest) -> bool:
        created = pod["metadata"].get("creationTimestamp")
        return bool(created) and self._since is not None and datetime.fromisoformat(created) >= self._since

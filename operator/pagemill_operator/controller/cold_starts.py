"""Cold starts as they are measured: each pod that became ready under this leader, once, with its engine's own phases.

Neighbours: `load.book` has what engines told, `backends.kubernetes.observe.start` makes phases of it, `reconcile` asks
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


class ColdStarts:
    def __init__(
        self,
        told: Callable[[str], Mapping[str, Mapping[str, float]]],
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`told`: of a key, the seconds that engines told, by pod's uid."""
        self._told = told
        self._metrics = metrics
        self._now = now
        self._since: datetime | None = None
        """Pods made earlier are the earlier leader's."""
        self._measured: dict[str, set[str]] = {}
        """Key -> uids."""
        self._latest: dict[str, LastStart] = {}

    def look(self, key: str, pods: Iterable[Manifest]) -> LastStart | None:
        """Measure what has become ready; the latest start that is known."""
        self._since = self._since or self._now()
        engines, by_uid = self._told(key), {pod["metadata"]["uid"]: pod for pod in pods}
        measured = self._measured[key] = self._measured.get(key, set()) & by_uid.keys()
        for uid in (by_uid.keys() & engines.keys()) - measured:
            if start := self._start(by_uid[uid], engines[uid]):
                measured.add(uid)
                self._metrics.started(start.seconds)
                self._latest[key] = max(start, self._latest.get(key, start), key=lambda each: each.time)
        return self._latest.get(key)

    def forget(self, key: str) -> None:
        self._measured.pop(key, None)
        self._latest.pop(key, None)

    def _start(self, pod: Manifest, engine: Mapping[str, float]) -> LastStart | None:
        created = pod["metadata"].get("creationTimestamp")
        if not created or self._since is None or datetime.fromisoformat(created) < self._since:
            return None
        return start_of(pod, ENGINE, engine)

"""Decides which replicas to start and which to drain next. A pure function of what is wanted and what runs.

A replacement starts first and is ready before an old replica drains; replicas that are not ready go first. The rules
are those of Kubernetes's rolling update: at most `replicas + surge` live, and at least `replicas - unavailable` ready
if so many were ready before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagemill_operator.load.store import emptiest_first
from pagemill_operator.plan.types import Group
from pagemill_operator.status.conditions import Phase, ReplicaObservation
from pagemill_protocol.report.load import EngineReport

NO_REPORTS: Mapping[str, EngineReport] = {}
_PHASE_RANK: Mapping[Phase, int] = {"asleep": 1, "pending": 2, "starting": 2, "loading": 2, "waking": 3, "ready": 3}
"""What removing a replica costs: almost nothing if it sleeps, a partly paid start if it starts."""


class Actions(NamedTuple):
    start: int
    """Number of replicas of the wanted digest to start."""
    drain: list[str]
    """Names of replicas to drain."""


def next_actions(
    group: Group,
    replicas: Sequence[ReplicaObservation],
    held: Mapping[str, EngineReport] = NO_REPORTS,
    standby: int = 0,
) -> Actions:
    """Return the replicas to start and to drain.

    `replicas` come oldest first; draining and gone ones are ignored. `held` is each replica's known load by name.
    `standby` counts the replicas beyond the group's that sleep; the module `standby` chooses them.
    """
    wanted = group.replicas + standby
    live = [replica for replica in replicas if replica.phase not in ("draining", "gone")]
    current = [replica for replica in live if replica.digest == group.digest]
    old = [replica for replica in live if replica.digest != group.digest]
    drain = _surplus(current, wanted, held)
    drain += _replaceable(wanted, group.unavailable, current, old)
    remaining = len(live) - len(drain)
    missing = max(0, wanted - len(current))
    num_allowed = wanted + group.surge - remaining
    return Actions(max(0, min(missing, num_allowed)), drain)


def _surplus(current: list[ReplicaObservation], wanted: int, held: Mapping[str, EngineReport]) -> list[str]:
    """Return the surplus replicas of the wanted digest: the cheapest to lose first, then the emptiest and youngest."""
    emptiest = emptiest_first(reversed(current), lambda replica: replica.name, held)
    by_worth = sorted(emptiest, key=lambda replica: _PHASE_RANK.get(replica.phase, 0))
    return [replica.name for replica in by_worth[: max(0, len(current) - wanted)]]


def _replaceable(
    wanted: int, unavailable: int, current: list[ReplicaObservation], old: list[ReplicaObservation]
) -> list[str]:
    """Return the old replicas that may be drained now: all that do not serve, and as many loaded ones as can be spared.

    Of the loaded ones, sleeping replicas go first.
    """
    idle = [replica.name for replica in old if not replica.loaded]
    loaded = sorted((replica for replica in old if replica.loaded), key=lambda replica: replica.phase != "asleep")
    spare = sum(replica.loaded for replica in current[:wanted]) + len(loaded) - max(0, wanted - unavailable)
    return idle + [replica.name for replica in loaded[: max(0, spare)]]

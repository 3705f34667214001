"""Which replicas to start and which to drain next, as a pure function of what is wanted and what runs.

Replacement surges, waits for readiness, then drains; what is not ready goes first. The rules are those of Kubernetes'
rolling update: at most `replicas + surge` live, at least `replicas - unavailable` ready while there were that many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagemill_operator.load.store import emptiest_first
from pagemill_operator.plan.types import Group
from pagemill_operator.status.conditions import Phase, ReplicaObservation
from pagemill_protocol.load import EngineHeld

NOTHING_KNOWN: Mapping[str, EngineHeld] = {}
_WORTH: Mapping[Phase, int] = {"asleep": 1, "pending": 2, "starting": 2, "loading": 2, "waking": 3, "ready": 3}
"""What is lost with a replica: next to nothing with one that sleeps, a start that was paid for with one that starts."""


class Actions(NamedTuple):
    start: int
    """Replicas of the wanted digest to start."""
    drain: list[str]
    """Names of replicas to drain."""


def next_actions(
    group: Group,
    replicas: Sequence[ReplicaObservation],
    held: Mapping[str, EngineHeld] = NOTHING_KNOWN,
    standby: int = 0,
) -> Actions:
    """`replicas` come oldest first; draining and gone ones are ignored. `held`: what is known of them, by name.

    `standby`: replicas beyond the group's that sleep; which ones do is `standby`'s.
    """
    wanted = group.replicas + standby
    live = [replica for replica in replicas if replica.phase not in ("draining", "gone")]
    current = [replica for replica in live if replica.digest == group.digest]
    old = [replica for replica in live if replica.digest != group.digest]
    drain = _surplus(current, wanted, held)
    drain += _replaceable(wanted, group.unavailable, current, old)
    remaining = len(live) - len(drain)
    missing = max(0, wanted - len(current))
    room = wanted + group.surge - remaining
    return Actions(max(0, min(missing, room)), drain)


def _surplus(current: list[ReplicaObservation], wanted: int, held: Mapping[str, EngineHeld]) -> list[str]:
    """Replicas of the wanted digest beyond the wanted number: the emptiest and youngest of those worth least."""
    emptiest = emptiest_first(reversed(current), lambda replica: replica.name, held)
    by_worth = sorted(emptiest, key=lambda replica: _WORTH.get(replica.phase, 0))
    return [replica.name for replica in by_worth[: max(0, len(current) - wanted)]]


def _replaceable(
    wanted: int, unavailable: int, current: list[ReplicaObservation], old: list[ReplicaObservation]
) -> list[str]:
    """Old replicas that may go now: those that do not serve, and loaded ones, that sleep before those that serve, as
    far as enough stay."""
    idle = [replica.name for replica in old if not replica.loaded]
    loaded = sorted((replica for replica in old if replica.loaded), key=lambda replica: replica.phase != "asleep")
    spare = sum(replica.loaded for replica in current[:wanted]) + len(loaded) - max(0, wanted - unavailable)
    return idle + [replica.name for replica in loaded[: max(0, spare)]]

"""Which replicas to start and which to drain next, as a pure function of what is wanted and what runs.

Replacement surges, waits for readiness, then drains; what is not ready goes first. The rules are those of Kubernetes'
rolling update: at most `replicas + surge` live, at least `replicas - unavailable` ready while there were that many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagemill_operator.load.held import emptiest_first
from pagemill_operator.plan.types import Group
from pagemill_operator.status.conditions import ReplicaObservation
from pagemill_protocol.load import EngineHeld

NOTHING_KNOWN: Mapping[str, EngineHeld] = {}


class Actions(NamedTuple):
    start: int
    """Replicas of the wanted digest to start."""
    drain: list[str]
    """Names of replicas to drain."""


def next_actions(
    group: Group, replicas: Sequence[ReplicaObservation], held: Mapping[str, EngineHeld] = NOTHING_KNOWN
) -> Actions:
    """`replicas` come oldest first; draining and gone ones are ignored. `held`: what is known of them, by name."""
    live = [replica for replica in replicas if replica.phase not in ("draining", "gone")]
    current = [replica for replica in live if replica.digest == group.digest]
    old = [replica for replica in live if replica.digest != group.digest]
    drain = _surplus(current, group.replicas, held)
    drain += _replaceable(group, current, old)
    remaining = len(live) - len(drain)
    missing = max(0, group.replicas - len(current))
    room = group.replicas + group.surge - remaining
    return Actions(max(0, min(missing, room)), drain)


def _surplus(current: list[ReplicaObservation], wanted: int, held: Mapping[str, EngineHeld]) -> list[str]:
    """Replicas of the wanted digest beyond the wanted number: those not ready first, then the emptiest and youngest."""
    emptiest = emptiest_first(reversed(current), lambda replica: replica.name, held)
    by_worth = sorted(emptiest, key=lambda replica: replica.phase == "ready")
    return [replica.name for replica in by_worth[: max(0, len(current) - wanted)]]


def _replaceable(group: Group, current: list[ReplicaObservation], old: list[ReplicaObservation]) -> list[str]:
    """Old replicas that may go now: those that serve nobody, and ready ones as far as enough stay ready."""
    idle = [replica.name for replica in old if replica.phase != "ready"]
    serving = [replica.name for replica in old if replica.phase == "ready"]
    ready_current = sum(replica.phase == "ready" for replica in current[: group.replicas])
    spare = ready_current + len(serving) - max(0, group.replicas - group.unavailable)
    return idle + serving[: max(0, spare)]

"""Which replicas to wake and which to put to sleep, as a pure function of how many shall serve and what all of them do.

Somebody who sleeps is woken before anything else could be ready. Put to sleep is only what is ready beyond the wanted
number, so with an unchanged number nothing goes to and fro, and nothing that starts is touched. How many replicas there
are is `rollout`'s, or Kubernetes'. Where nobody scales, nobody is woken either: who sleeps was told to by a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagemill_operator.load.store import emptiest_first
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Phase, ReplicaObservation
from pagemill_protocol.load import EngineHeld


class Orders(NamedTuple):
    """Names of replicas."""

    wake: list[str]
    sleep: list[str]


NONE = Orders([], [])
NOTHING_KNOWN: Mapping[str, EngineHeld] = {}


def next_orders(
    plan: Plan, replicas: Sequence[ReplicaObservation], held: Mapping[str, EngineHeld] = NOTHING_KNOWN
) -> Orders:
    """`replicas` come oldest first. `held`: what is known of them, by name."""
    if plan.autoscaling is None or plan.autoscaling.mode != "Active":
        return NONE
    live = [replica for replica in replicas if replica.live]
    ready, waking, asleep = (_in_phase(phase, live) for phase in ("ready", "waking", "asleep"))
    missing = plan.replicas - len(ready) - len(waking)
    if missing > 0:
        return Orders([replica.name for replica in asleep[:missing]], [])
    if any(replica.digest != plan.groups[0].digest for replica in live):
        # Replacing counts those that are ready: one that slept would look like one that never comes.
        return NONE
    emptiest = emptiest_first(reversed(ready), lambda replica: replica.name, held)
    num_tired = min(len(ready) - plan.replicas, plan.standby - len(asleep))
    return Orders([], [replica.name for replica in emptiest[: max(0, num_tired)]])


def _in_phase(phase: Phase, replicas: list[ReplicaObservation]) -> list[ReplicaObservation]:
    return [replica for replica in replicas if replica.phase == phase]

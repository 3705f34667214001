"""Runs any scaling policy as the scaler of one simulated fleet: with its settings, its memory, and its view of the
fleet.

The operator's own policies get the signals of the load stream. A rival gets what its platform scrapes: the pods' own
gauges instead of what their engines have reported to a gateway.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.policy import ScalingPolicy, ask
from pagemill_operator.autoscaler.registry import find_policy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.load import EngineReport
from pagemill_simulator.scaling.policy import FleetSnapshot, ReplicaBounds
from pagemill_simulator.scaling.rival import Rival

INTERVAL_S = 2.0
"""The operator's interval in a cluster."""
REMEMBERED = 10_000


class SimulatedPolicy:
    """One policy with its memory for one fleet."""

    def __init__(
        self,
        policy: ScalingPolicy[Any],
        settings: ScalingSettings,
        *,
        name: str = "",
        interval_s: float = INTERVAL_S,
        wakes_at_once: bool = True,
        scrapes: bool = False,
    ) -> None:
        """`name` replaces the policy's. With `scrapes` it gets the pods' gauges instead of the load stream."""
        self.name = name or policy.name
        self.interval_s = interval_s
        self.wakes_at_once = wakes_at_once
        self._policy = policy
        # A simulated fleet follows every decision: a mere recommendation would be judged by what did not happen.
        self._settings = msgspec.structs.replace(settings, mode="Active")
        self._memory = policy.memory_type()
        self._scrapes = scrapes
        self.changes: deque[tuple[float, Decision]] = deque(maxlen=REMEMBERED)
        """The latest changes of the replicas, with their times."""

    def decide(self, seen: FleetSnapshot) -> int:
        signals = scraped(seen) if self._scrapes else self._signals(seen)
        decision, self._memory = ask(self._policy, self._settings, signals, self._memory)
        if decision.changes:
            self.changes.append((seen.at_s, decision))
        return decision.replicas

    def _signals(self, seen: FleetSnapshot) -> Signals:
        if not self._policy.sees_replicas:
            return seen.signals
        return msgspec.structs.replace(seen.signals, replicas=_replicas(seen))


def own(settings: ScalingSettings, *, name: str = "pagemill") -> SimulatedPolicy:
    """Return the policy that the settings name. Raise `UnknownPolicyError`."""
    return SimulatedPolicy(find_policy(settings.policy), settings, name=name)


def rival(policy: Rival[Any], bounds: ReplicaBounds) -> SimulatedPolicy:
    return SimulatedPolicy(
        policy,
        ScalingSettings("Active", *bounds, learns_idle_s=True),
        interval_s=policy.interval_s,
        wakes_at_once=policy.wakes_at_once,
        scrapes=True,
    )


def scraped(seen: FleetSnapshot) -> Signals:
    """Return the signals with the pods' present gauges, and the requests that draining pods still run."""
    signals = seen.signals
    engines = msgspec.structs.replace(
        signals.engines,
        num_requests_running=sum(pod.load.num_requests_running for pod in seen.pods) + seen.num_on_leaving,
        num_requests_waiting=sum(pod.load.num_requests_waiting for pod in seen.pods),
    )
    return msgspec.structs.replace(
        signals,
        at_s=seen.at_s,
        fleet=msgspec.structs.replace(signals.fleet, wanted=seen.wanted, ready=seen.ready),
        engines=engines,
        queue=msgspec.structs.replace(signals.queue, num_requests=seen.num_held),
        replicas=_replicas(seen),
    )


def _replicas(seen: FleetSnapshot) -> tuple[EngineReport, ...]:
    """Return the ready pods' loads: a pod that loads has no metrics."""
    return tuple(EngineReport(pod.name, pod.load) for pod in seen.pods if pod.is_ready)

"""The protocol of a scaling policy.

One policy object serves all deployments and has no state: its memory of a deployment is a value that it is given and
returns anew, so a decision can be repeated from its record. Neighbours: `registry` finds policies by name; `behavior`
has stabilization windows and rate limits that policies may share.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals

M = TypeVar("M")


class ScalingPolicy(Protocol[M]):
    @property
    def name(self) -> str:
        """The policy's name in `spec.autoscaling.policy`."""
        ...

    @property
    def memory_type(self) -> type[M]:
        """The type of the memory: a frozen `msgspec.Struct` that can be made without arguments for a new deployment."""
        ...

    @property
    def sees_replicas(self) -> bool:
        """Whether the policy needs `Signals.replicas`, which is then recorded with each decision."""
        ...

    @property
    def reads_slo(self) -> bool:
        """Whether the policy scales by `spec.autoscaling.slo`; otherwise the condition `FieldsSupported` reports it."""
        ...

    def decide(self, settings: ScalingSettings, signals: Signals, memory: M) -> tuple[Decision, M]:
        """Return the decision and the new memory. The same arguments must give the same result.

        The operator calls it every two seconds, and at once when a request waits while no replica runs. A policy that
        decides less often keeps the time of its latest decision (`signals.at_s`) in its memory. A number of replicas
        outside of the bounds is moved to the nearer bound.
        """
        ...


def ask(policy: ScalingPolicy[M], settings: ScalingSettings, signals: Signals, memory: M) -> tuple[Decision, M]:
    """Return the policy's decision, moved into the bounds of the resource, and its new memory.

    If a price is set, the message of a change states the cost before and after.
    """
    decision, memory = policy.decide(settings, signals, memory)
    replicas = settings.clamp(decision.replicas)
    if replicas != decision.replicas:
        bounds = f"minReplicas {settings.min_replicas} and maxReplicas {settings.max_replicas}"
        message = f"{decision.message}; {decision.replicas} replicas are out of bounds: {bounds}"
        decision = msgspec.structs.replace(decision, replicas=replicas, reason="OutOfBounds", message=message)
    before, after = (settings.cost_of(number).money for number in (decision.replicas_before, replicas))
    if decision.changes and before is not None and after is not None:
        message = f"{decision.message}; {after:.2f} per hour instead of {before:.2f}"
        decision = msgspec.structs.replace(decision, message=message)
    return decision, memory

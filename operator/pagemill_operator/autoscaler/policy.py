"""The protocol of a scaling policy: what an algorithm gets, and what it answers.

A policy is one object for all deployments and keeps nothing: what it remembers of a deployment is a value that it is
given and that it answers anew, so a decision can be repeated from its record. Neighbours: `registry` finds policies by
name; `behavior` has stabilization windows and rate limits that policies may share.
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
        """As `spec.autoscaling.policy` names it."""
        ...

    @property
    def memory_type(self) -> type[M]:
        """A frozen `msgspec.Struct` that is made without arguments for a deployment that is new to the policy."""
        ...

    @property
    def sees_replicas(self) -> bool:
        """`Signals.replicas` is filled, and recorded with each decision; False where sums are enough."""
        ...

    def decide(self, settings: ScalingSettings, signals: Signals, memory: M) -> tuple[Decision, M]:
        """Replicas from now on, and what to remember. The same arguments give the same answer.

        Asked every two seconds, and at once when a request waits where no replica runs: a policy that decides less
        often remembers when it did, by `signals.at_s`. Answers outside of the bounds are moved to the nearer one.
        """
        ...


def ask(policy: ScalingPolicy[M], settings: ScalingSettings, signals: Signals, memory: M) -> tuple[Decision, M]:
    """The policy's decision, moved into the bounds of the resource."""
    decision, memory = policy.decide(settings, signals, memory)
    replicas = settings.clamp(decision.replicas)
    if replicas == decision.replicas:
        return decision, memory
    bounds = f"minReplicas {settings.min_replicas} and maxReplicas {settings.max_replicas}"
    message = f"{decision.message}; {decision.replicas} replicas are out of bounds: {bounds}"
    return msgspec.structs.replace(decision, replicas=replicas, reason="OutOfBounds", message=message), memory

"""A backend's observation of one deployment: the input of `conditions`. Values only; nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagemill_operator.plan.types import Plan, Problem

Phase = Literal["pending", "starting", "loading", "ready", "asleep", "waking", "crashed", "draining", "gone"]
Stage = Literal["Planned", "Scheduled", "ModelLoaded"]
INSUFFICIENT_GPU = "InsufficientGPU"
"""The reason of a replica that waits because no node has free GPUs."""


@dataclass(frozen=True)
class Fault:
    """Why something does not work; `stage` is the condition that it breaks."""

    stage: Stage
    reason: str
    """CamelCase."""
    message: str
    """Cause and remedy, without values that change by themselves."""


@dataclass(frozen=True)
class ReplicaObservation:
    """One replica at one instant."""

    name: str
    phase: Phase
    digest: str = ""
    reason: str = ""
    """CamelCase cause of a crash or a wait."""
    message: str = ""
    ready_at: float = field(default=0.0, compare=False)
    """When the replica became ready, on a clock that the deployment's replicas share; 0 if unknown."""

    @property
    def running(self) -> bool:
        return self.phase in ("starting", "loading") or self.loaded

    @property
    def loaded(self) -> bool:
        """Whether the replica has generated a token: it serves, or could after being woken."""
        return self.phase in ("ready", "asleep", "waking")

    @property
    def live(self) -> bool:
        return self.phase not in ("draining", "gone")

    @property
    def fault(self) -> Fault | None:
        """The fault that keeps the replica from becoming ready; None if it only needs time."""
        if not self.reason or not self.live or self.loaded:
            return None
        return Fault("Scheduled" if self.phase == "pending" else "ModelLoaded", self.reason, self.message)


@dataclass(frozen=True)
class ScalingState:
    """The autoscaler's state."""

    active: bool
    """False if the autoscaler keeps the number of replicas because a signal is missing."""
    advisory: bool
    """Whether the autoscaler only recommends."""
    message: str
    """The condition's message, without values that change by themselves."""
    why: str = ""
    """The reason of the latest change."""
    slo_met: bool | None = None
    slo_reachable: bool = True
    """Whether the SLO can be reached within the bounds of the resource."""
    slo_message: str = ""


@dataclass(frozen=True)
class LastStart:
    """The latest start of a replica."""

    name: str
    time: str
    """When the replica was ready; RFC 3339."""
    seconds: Mapping[str, float]
    """Seconds by phase, including `total`."""


@dataclass(frozen=True)
class Observation:
    """The observed state of one deployment."""

    plan: Plan | None
    """None if the spec cannot be read; see `invalid`."""
    replicas: tuple[ReplicaObservation, ...] = ()
    gateway_ready: bool = False
    gateway_message: str = "the gateway is not ready"
    conflict: Problem | None = None
    unplanned: Problem | None = None
    """Why it is unknown whether the plan can work, for example a source that only pods can read."""
    invalid: tuple[Problem, ...] = ()
    fault: Fault | None = None
    """The fault that prevents any replica from existing."""
    loader: ReplicaObservation | None = None
    """The loader that fills the model's volume while engines wait for it."""
    scaling: ScalingState | None = None
    """None if the number of replicas is fixed, or nothing was decided yet."""
    rollout: str = ""
    """What differs from the usual in the rollout that goes on; empty: nothing."""
    warnings: tuple[Fault, ...] = ()
    """What is wrong although it keeps no replica from serving."""
    last_start: LastStart | None = None
    """None if no start was measured."""
    progress: str = ""
    """The loader's progress, such as `1.2 of 4.0 GiB`; empty if no loader runs or it is unknown."""
    unused_settings: frozenset[str] | None = frozenset()
    """The engines' settings that have no effect with the kind of their model; None until an engine has read it."""
    routing_policies: tuple[str, ...] = ()
    """The policies of gateways that lack the deployment's own; empty: none lacks it."""
    requeue_after_s: float | None = None
    """Seconds after which time alone may change the observation; None: never."""

    @property
    def is_in_effect(self) -> bool:
        """Whether the plan runs or is on its way to."""
        refused = self.fault is not None and self.fault.stage == "Planned"
        return self.plan is not None and not self.plan.problems and self.conflict is None and not refused

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(group.digest for group in self.plan.groups) if self.plan else frozenset()

    def ready(self, digest: str | None = None) -> list[ReplicaObservation]:
        return [r for r in self.replicas if r.phase == "ready" and digest in (None, r.digest)]

    def current(self) -> list[ReplicaObservation]:
        """Return the live replicas of the plan, without those of earlier plans."""
        return [replica for replica in self.replicas if replica.live and replica.digest in self.digests]

    def ready_current(self) -> list[ReplicaObservation]:
        return [replica for replica in self.current() if replica.phase == "ready"]

    def asleep(self) -> list[ReplicaObservation]:
        return [replica for replica in self.replicas if replica.phase == "asleep"]

    def older(self) -> list[ReplicaObservation]:
        """Return the ready replicas of an earlier plan."""
        return [replica for replica in self.ready() if replica.digest not in self.digests]

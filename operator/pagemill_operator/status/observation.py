"""What a backend observed of one deployment: the input of `conditions`. Values only, nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagemill_operator.plan.types import Plan, Problem

Phase = Literal["pending", "starting", "loading", "ready", "asleep", "waking", "crashed", "draining", "gone"]
Stage = Literal["Planned", "Scheduled", "ModelLoaded"]


@dataclass(frozen=True)
class Fault:
    """Why something does not work, for conditions: `stage` is the condition that it breaks."""

    stage: Stage
    reason: str
    """CamelCase."""
    message: str
    """With the remedy, and without anything that changes by itself."""


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
    """When it became ready, on a clock that all of its deployment share; 0: not known."""

    @property
    def running(self) -> bool:
        return self.phase in ("starting", "loading") or self.loaded

    @property
    def loaded(self) -> bool:
        """It has generated a token: it serves, or could after being woken."""
        return self.phase in ("ready", "asleep", "waking")

    @property
    def live(self) -> bool:
        return self.phase not in ("draining", "gone")

    @property
    def fault(self) -> Fault | None:
        """What keeps it from becoming ready, if that is more than time."""
        if not self.reason or not self.live or self.loaded:
            return None
        return Fault("Scheduled" if self.phase == "pending" else "ModelLoaded", self.reason, self.message)


@dataclass(frozen=True)
class Scaling:
    """What the autoscaler says of itself."""

    active: bool
    """False: it holds, because something is missing."""
    advisory: bool
    """It decides, and does not act."""
    message: str
    """Without anything that changes by itself."""
    why: str = ""
    """The latest change."""
    slo_met: bool | None = None
    slo_reachable: bool = True
    """Within the bounds of the resource."""
    slo_message: str = ""


@dataclass(frozen=True)
class LastStart:
    """How the latest start of a replica went."""

    name: str
    time: str
    """When it was ready; RFC 3339."""
    seconds: Mapping[str, float]
    """By phase, `total` among them."""


@dataclass(frozen=True)
class Observation:
    """What is known about one deployment."""

    plan: Plan | None
    """None where the spec cannot be read; `invalid` says why."""
    replicas: tuple[ReplicaObservation, ...] = ()
    gateway_ready: bool = False
    gateway_message: str = "the gateway is not ready"
    conflict: Problem | None = None
    unplanned: Problem | None = None
    """Why it is not known whether the plan can work, for example a source that only the pods can read."""
    invalid: tuple[Problem, ...] = ()
    fault: Fault | None = None
    """What keeps replicas from existing at all."""
    loader: ReplicaObservation | None = None
    """What fills the model's volume, while engines wait for it."""
    scaling: Scaling | None = None
    """None where the number of replicas is fixed, or nothing was decided yet."""
    last_start: LastStart | None = None
    """None: none was measured."""
    progress: str = ""
    """How far the loader is, such as `1.2 of 4.0 GiB`; empty where none runs or nothing is known."""
    look_again_s: float | None = None
    """When time alone may make this another observation; None: never."""

    @property
    def carried_out(self) -> bool:
        """The plan is what runs, or is on its way to."""
        refused = self.fault is not None and self.fault.stage == "Planned"
        return self.plan is not None and not self.plan.problems and self.conflict is None and not refused

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(group.digest for group in self.plan.groups) if self.plan else frozenset()

    def ready(self, digest: str | None = None) -> list[ReplicaObservation]:
        return [r for r in self.replicas if r.phase == "ready" and digest in (None, r.digest)]

    def current(self) -> list[ReplicaObservation]:
        """Live replicas of the plan, those before it left out."""
        return [replica for replica in self.replicas if replica.live and replica.digest in self.digests]

    def ready_current(self) -> list[ReplicaObservation]:
        return [replica for replica in self.current() if replica.phase == "ready"]

    def asleep(self) -> list[ReplicaObservation]:
        return [replica for replica in self.replicas if replica.phase == "asleep"]

    def older(self) -> list[ReplicaObservation]:
        """Ready replicas of an earlier plan."""
        return [replica for replica in self.ready() if replica.digest not in self.digests]

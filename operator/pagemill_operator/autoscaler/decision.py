"""What a scaling policy answers: replicas, why, and what it weighed."""

from __future__ import annotations

from typing import Literal

import msgspec

Reason = Literal[
    "Steady",
    "ScaledUp",
    "ScaledDown",
    "ScaledToZero",
    "Woken",
    "SignalsMissing",
    "Stabilizing",
    "Panic",
    "ReplicasStarting",
    "RateLimited",
    "OutOfBounds",
]


class Goal(msgspec.Struct, frozen=True):
    """One target, and the replicas that it asks for."""

    name: str
    needed: int = 0
    enough: int = 0
    """The most that it still has use for: between `needed` and this it is content."""
    reason: str = ""
    missing: str = ""
    """The number without which it cannot be judged; `needed` is then a lower bound."""
    unreachable: str = ""
    """Why no number of replicas meets it."""
    ample: int = 0
    """What half as much load again would have use for, if that is more than `enough`."""

    @property
    def most_used(self) -> int:
        """Beyond this a replica is idle, whatever the noise."""
        return max(self.enough, self.ample)


class Candidate(msgspec.Struct, frozen=True):
    """A number of replicas that was weighed against the SLO."""

    replicas: int
    ttft_ms: float | None
    """None: without bound."""
    tpot_ms: float | None
    meets: bool
    limit: str = ""
    """What it runs out of."""


class Decision(msgspec.Struct, frozen=True):
    replicas_before: int
    replicas: int
    reason: Reason
    """For the change, or for keeping the number."""
    message: str
    """For people, with the numbers."""
    demand: int = 0
    """Replicas that the load needs, before windows and limits."""
    goals: tuple[Goal, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    missing: tuple[str, ...] = ()
    unreachable: str = ""
    """Why the SLO cannot be met within the bounds."""
    panic: bool = False

    @property
    def changes(self) -> bool:
        return self.replicas != self.replicas_before


def decided(before: int, after: int, message: str) -> Decision:
    """A decision whose reason is the change itself, or that there is none."""
    return Decision(before, after, reason_for(before, after), message, demand=after)


def reason_for(before: int, after: int) -> Reason:
    if after == before:
        return "Steady"
    if after > before:
        return "ScaledUp" if before else "Woken"
    return "ScaledDown" if after else "ScaledToZero"


def replicas_of(number: int) -> str:
    return f"{number} replica" if number == 1 else f"{number} replicas"


def rate_limited(demand: int) -> str:
    return f"the load needs {replicas_of(demand)}; spec.autoscaling.behavior allows no change yet"

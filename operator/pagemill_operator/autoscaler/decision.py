"""The decision of a scaling policy: the number of replicas, the reason, and what was weighed."""

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
    "AtMaximum",
    "Saturated",
]


class Goal(msgspec.Struct, frozen=True):
    """One target and the numbers of replicas that it asks for."""

    name: str
    needed: int = 0
    """The fewest replicas that meet the target."""
    enough: int = 0
    """The most replicas that the target has use for: it asks for no change between `needed` and this number."""
    reason: str = ""
    missing: str = ""
    """The signal that is missing to evaluate the target; `needed` is then a lower bound. Empty: none."""
    unreachable: str = ""
    """Why no number of replicas meets the target. Empty: some number does."""
    ample: int = 0
    """The replicas that 1.5 times the load would have use for, where that is more than `enough`."""
    settled: int | None = None
    """The replicas that the present arrivals have use for, without an expected rise; None: `most_kept`."""

    @property
    def most_kept(self) -> int:
        """The number of replicas that the target asks to keep."""
        return max(self.needed, self.enough)

    @property
    def most_used(self) -> int:
        """The number of replicas beyond which one would be idle even if the load rose by chance."""
        return max(self.enough, self.ample)


class ReplicaCandidate(msgspec.Struct, frozen=True):
    """A number of replicas that was weighed against the SLO, with its predicted latencies."""

    replicas: int
    ttft_ms: float | None
    """Predicted time to first token; None: requests would wait without bound."""
    tpot_ms: float | None
    """Predicted time per output token; None: without bound."""
    meets: bool
    """Whether the predicted latencies meet the SLO."""
    limit: str = ""
    """The resource of a replica that runs out. Empty: none."""
    share: float = 0.0
    """The share of the requests that the predicted latencies apply to; 0: not recorded."""
    requests_per_s: float = 0.0
    """The arrivals for which the latencies are predicted; 0: not recorded."""


class Decision(msgspec.Struct, frozen=True):
    replicas_before: int
    replicas: int
    reason: Reason
    """The reason for the change, or for keeping the number."""
    message: str
    """The reason in words, with its numbers."""
    demand: int = 0
    """The replicas that the load needs, before stabilization windows and rate limits."""
    goals: tuple[Goal, ...] = ()
    candidates: tuple[ReplicaCandidate, ...] = ()
    missing: tuple[str, ...] = ()
    """The missing signals of all goals."""
    unreachable: str = ""
    """Why the SLO cannot be met within the bounds. Empty: it can."""
    panic: bool = False
    """Whether a burst was seen within the last minute, so that nothing is removed."""

    @property
    def changes(self) -> bool:
        """Whether the number of replicas changes."""
        return self.replicas != self.replicas_before


def decided(before: int, after: int, message: str) -> Decision:
    """Return a decision whose reason follows from the change of the number."""
    return Decision(before, after, reason_for(before, after), message, demand=after)


def reason_for(before: int, after: int) -> Reason:
    """Return the reason that a change of the number stands for."""
    if after == before:
        return "Steady"
    if after > before:
        return "ScaledUp" if before else "Woken"
    return "ScaledDown" if after else "ScaledToZero"


def replicas_of(number: int) -> str:
    """Return the number with its noun, as in "1 replica"."""
    return f"{number} replica" if number == 1 else f"{number} replicas"


def rate_limited(demand: int) -> str:
    """Return the message of a decision that `behavior` delays."""
    return f"the load needs {replicas_of(demand)}; spec.autoscaling.behavior allows no change yet"

"""What was decided, and the record of it: enough to decide it again and get the same."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.policy import Policy
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.slo import Candidate
from pagemill_operator.autoscaler.wishes import Goal

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


class Decision(msgspec.Struct, frozen=True):
    replicas_before: int
    replicas: int
    reason: Reason
    """Of the change, or of there being none."""
    message: str
    """For people, with the numbers."""
    wish: int = 0
    """What the goals ask for, before windows and limits."""
    goals: tuple[Goal, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    """Numbers of replicas that were weighed against the SLO."""
    missing: tuple[str, ...] = ()
    unreachable: str = ""
    """Why the SLO cannot be met within the bounds."""
    panic: bool = False

    @property
    def changes(self) -> bool:
        return self.replicas != self.replicas_before


class Record(msgspec.Struct, frozen=True):
    """One decision with everything that went into it."""

    key: str
    time: str
    """RFC 3339, for people; decisions go by `signals.at_s`."""
    policy: Policy
    signals: Signals
    memory: Memory
    decision: Decision


def encode_record(record: Record) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(record)


def log_line(record: Record) -> str:
    """The whole record of a change, else only why there is none."""
    decision = record.decision
    if decision.changes:
        return encode_record(record).decode()
    return f"{record.key}: {decision.replicas} replicas, {decision.reason}: {decision.message}"


def decode_record(line: bytes) -> Record:
    """Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(line, type=Record)

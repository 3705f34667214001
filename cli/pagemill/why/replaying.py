"""Decides recorded inputs again, with the autoscaler's own `decide`, and says where this version would do otherwise."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_operator.autoscaler.decide import replay
from pagemill_operator.autoscaler.decision import Decision, Record


class Replay(NamedTuple):
    decision: Decision
    """This version's decision on the recorded inputs."""
    is_same: bool

    @property
    def words(self) -> str:
        if self.is_same:
            return "same"
        return f"differs: {self.decision.replicas} replicas, {self.decision.reason}"


def decide_again(record: Record) -> Replay:
    decision = replay(record)
    return Replay(decision, decision == record.decision)

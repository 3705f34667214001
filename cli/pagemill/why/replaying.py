"""Repeats recorded decisions with their policies and inputs, and compares the results with the records."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.records import Record, replay
from pagemill_operator.autoscaler.registry import UnknownPolicyError


class Replay(NamedTuple):
    decision: Decision | None
    """This version's decision from the recorded inputs; None if there is none, because of `fault`."""
    is_same: bool
    fault: str = ""

    @property
    def words(self) -> str:
        if self.is_same:
            return "same"
        if self.decision is None:
            return f"not replayed: {self.fault}"
        return f"differs: {self.decision.replicas} replicas, {self.decision.reason}"


def decide_again(record: Record) -> Replay:
    try:
        decision = replay(record)
    except (UnknownPolicyError, msgspec.ValidationError) as error:
        return Replay(None, is_same=False, fault=str(error))
    return Replay(decision, decision == record.decision)

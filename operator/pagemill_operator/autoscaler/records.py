"""The record of one decision: everything that went into it, enough to decide it again and get the same."""

from __future__ import annotations

from typing import Any

import msgspec

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.policy import ask
from pagemill_operator.autoscaler.registry import find_policy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals


class Record(msgspec.Struct, frozen=True):
    key: str
    time: str
    """RFC 3339, for people; decisions go by `signals.at_s`."""
    settings: ScalingSettings
    """`settings.policy` names the policy that decided."""
    signals: Signals
    memory: Any
    """The policy's own, before the decision: of its `memory_type`, or what JSON makes of that."""
    decision: Decision


def replay(record: Record) -> Decision:
    """Decide it again. Raises `UnknownPolicyError` where the policy is not installed here."""
    policy = find_policy(record.settings.policy)
    memory = record.memory
    if not isinstance(memory, policy.memory_type):
        memory = msgspec.convert(memory, policy.memory_type)
    return ask(policy, record.settings, record.signals, memory)[0]


def encode_record(record: Record) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(record)


def decode_record(line: bytes) -> Record:
    """Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(line, type=Record)


def is_record(line: bytes) -> bool:
    """Whether this version can read it."""
    try:
        decode_record(line)
    except (msgspec.DecodeError, ValueError):
        return False
    return True


def log_line(record: Record) -> str:
    """The whole record of a change, else only why there is none."""
    decision = record.decision
    if decision.changes:
        return encode_record(record).decode()
    return f"{record.key}: {decision.replicas} replicas, {decision.reason}: {decision.message}"

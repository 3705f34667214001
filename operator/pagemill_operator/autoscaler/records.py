"""The record of one decision with all of its inputs, from which the decision can be repeated."""

from __future__ import annotations

from typing import Any

import msgspec

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.policy import ask
from pagemill_operator.autoscaler.registry import find_policy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals


class Record(msgspec.Struct, frozen=True):
    """One decision and its inputs."""

    key: str
    """The deployment: namespace and name, with a slash between them."""
    time: str
    """The time in the form of RFC 3339, for people; decisions use `signals.at_s`."""
    settings: ScalingSettings
    """The settings; `settings.policy` names the policy that decided."""
    signals: Signals
    memory: Any
    """The policy's memory before the decision: of its `memory_type`, or as decoded from JSON."""
    decision: Decision


def replay(record: Record) -> Decision:
    """Repeat the decision. Raises `UnknownPolicyError` where the policy is not installed."""
    policy = find_policy(record.settings.policy)
    memory = record.memory
    if not isinstance(memory, policy.memory_type):
        memory = msgspec.convert(memory, policy.memory_type)
    return ask(policy, record.settings, record.signals, memory)[0]


def encode_record(record: Record) -> bytes:
    """Return the record as one line of JSON."""
    return msgspec.json.encode(record)


def decode_record(line: bytes) -> Record:
    """Read a record from one line of JSON. Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(line, type=Record)


def is_record(line: bytes) -> bool:
    """Whether this version can read the line as a record."""
    try:
        decode_record(line)
    except (msgspec.DecodeError, ValueError):
        return False
    return True


def log_line(record: Record) -> str:
    """Return the line for the log: the whole record of a change, otherwise the reason for keeping the number."""
    decision = record.decision
    if decision.changes:
        return encode_record(record).decode()
    return f"{record.key}: {decision.replicas} replicas, {decision.reason}: {decision.message}"

"""Decisions on the number of replicas, as the operator reports them to gateways, which show them on the page `/ui`.

They are for people: the complete records with all inputs are the operator's (`pagemill why`).
"""

from __future__ import annotations

import msgspec

KEPT_DECISIONS = 200
"""The latest decisions of all deployments together that operator and gateways keep for the page."""


class ScalingGoal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One target, the replicas that it needs, and why."""

    name: str
    needed: int = 0
    reason: str = ""
    """Why it needs them, what is missing to know that, or why no number suffices."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision that changed the number of replicas, or had a new reason not to."""

    key: str
    """The deployment: namespace and name, with a slash between them."""
    time: str
    """RFC 3339, in UTC and with seconds, so that times sort as text."""
    mode: str = ""
    """`Active`: the decision is carried out; `Advisory`: it is only shown."""
    policy: str = ""
    replicas_before: int = 0
    replicas: int = 0
    reason: str = ""
    """One word."""
    message: str = ""
    """The reason in words, with its numbers."""
    goals: list[ScalingGoal] = []


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decisions, oldest first: all that the operator has when it connects, then those that are new."""

    decisions: list[ScalingDecision] = []

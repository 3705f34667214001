"""The error of a plan that cannot be made."""

from __future__ import annotations


class PlanError(Exception):
    """The message names the field or option, its value and the remedy."""

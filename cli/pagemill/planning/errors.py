"""The error of `pagemill plan` and `pagemill simulate`."""

from __future__ import annotations


class PlanError(Exception):
    """A plan that cannot be made; the message names the field or option, its value and the remedy."""


class DeviceTooSmall(PlanError):
    """A device on which a model does not fit."""

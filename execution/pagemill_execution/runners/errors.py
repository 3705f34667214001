"""Errors of a runner's `wait` that no request of the step caused, and the message of a request that failed."""

from __future__ import annotations

NON_FINITE = "The model produced values that are not finite for this request."


class StepSkippedError(RuntimeError):
    """The step before raised, so this one was not run."""


class DeviceLostError(RuntimeError):
    """This process can no longer use the device and ends.

    After any other error the next steps may succeed.
    """

    reason = "DeviceLost"

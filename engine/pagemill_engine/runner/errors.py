"""What a runner's `wait` may raise that is no fault of the step's requests, and what it says of a request at fault."""

from __future__ import annotations

NON_FINITE = "The model produced values that are not finite for this request."


class StepSkippedError(RuntimeError):
    """The step before raised, so this one, launched on its account, was not run."""


class DeviceLostError(RuntimeError):
    """Nothing can be computed on the device any more, by this process at least: it ends. After any other error the next
    steps may go well."""

    reason = "DeviceLost"

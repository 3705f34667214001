"""The error of an adapter that cannot be served; it concerns requests for that adapter only."""

from __future__ import annotations

from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.source_errors import shortened


class AdapterError(Exception):
    """`reason`: CamelCase, for conditions. `message` names the setting or the tensor, and the remedy.

    Reasons: AdapterNotFound, AdapterUnreadable, AdapterUnsupported, AdapterTooLarge, AdapterOfAnotherModel.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, shortened(message)
        super().__init__(f"{reason}: {self.message}")


def refused(message: str, param: str = "model") -> PagemillError:
    """Return the error of a request for an adapter that is refused for the reason in `message`."""
    return invalid_field(param, f"The adapter cannot be served: {message}", code="adapter_refused")


def unsupported(message: str) -> AdapterError:
    return AdapterError("AdapterUnsupported", message)


def unreadable(message: str) -> AdapterError:
    return AdapterError("AdapterUnreadable", message)

"""The error of an adapter that cannot be served; it concerns requests for that adapter only."""

from __future__ import annotations

from pagemill_protocol.source_errors import shortened


class AdapterError(Exception):
    """`reason`: CamelCase, for conditions. `message` names the setting or the tensor, and the remedy.

    Reasons: AdapterNotFound, AdapterUnreadable, AdapterUnsupported, AdapterTooLarge, AdapterOfAnotherModel.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, shortened(message)
        super().__init__(f"{reason}: {self.message}")


def unsupported(message: str) -> AdapterError:
    return AdapterError("AdapterUnsupported", message)


def unreadable(message: str) -> AdapterError:
    return AdapterError("AdapterUnreadable", message)

"""Why a model could not be loaded onto its volume."""

from __future__ import annotations


class LoaderError(Exception):
    """`reason` is a CamelCase condition reason, the message names the value and the remedy.

    Reasons: ModelNotFound, Unauthorized, DiskFull, HubUnreachable, SourceUnsupported, ModelUnreadable, ModelCorrupt,
    VolumeUnusable, and `UnsupportedArchitecture` of the model's header.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

"""Why a model cannot be loaded, as users and the operator see it."""

from __future__ import annotations


class LoadError(Exception):
    """`reason` is a CamelCase condition reason, `message` names the value and the remedy.

    Reasons: ModelNotFound, SourceUnavailable, ModelUnreadable, UnsupportedArchitecture, UnsupportedQuantization,
    ModelTooLarge, MaxModelLenTooLarge, KVCacheTooSmall, KVCacheTooLarge, StepTooLarge, GraphsTooLarge,
    SettingsUnsupported, DeviceUnavailable.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

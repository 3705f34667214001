"""The error of a model that cannot be loaded, for users and the operator."""

from __future__ import annotations


class LoadError(Exception):
    """A model cannot be loaded. `reason`: a CamelCase condition reason. `message`: names the value and the remedy.

    Reasons: ModelNotFound, SourceUnavailable, ModelUnreadable, UnsupportedArchitecture, UnsupportedQuantization,
    ModelTooLarge, MaxModelLenTooLarge, KVCacheTooSmall, KVCacheTooLarge, StepTooLarge, GraphsTooLarge,
    SettingsUnsupported, DeviceUnavailable.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

"""The error for models that cannot be computed, shared by all readers of the registry."""

from __future__ import annotations

from pagemill_protocol.source_errors import SourceError


class UnsupportedModelArchitecture(SourceError):
    """The files are valid, but no model family fits them."""

    def __init__(self, message: str) -> None:
        super().__init__("model.source", message, reason="UnsupportedArchitecture")

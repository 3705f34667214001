"""Why a model's files cannot be computed here, as every reader of the registry says it."""

from __future__ import annotations

from pagemill_protocol.source_errors import SourceError


class UnsupportedModelArchitecture(SourceError):
    """The files are fine, but no model definition here fits them."""

    def __init__(self, message: str) -> None:
        super().__init__("model.source", message, reason="UnsupportedArchitecture")

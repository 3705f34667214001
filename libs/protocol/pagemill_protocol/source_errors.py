"""Errors of models that cannot be found, fetched or read: one exception for sources and for the files in them.

`pagemill_models.sources` and all readers of a model's files raise them; processes write the error as their termination
message.
"""

from __future__ import annotations

import re

MAX_QUOTED_CHARS = 200
"""Most characters of a file that a message quotes: the file may have come from anywhere, and the message goes on."""
MAX_MESSAGE_CHARS = 2000
_QUOTE = re.compile(r"`([^`]*)`")


class SourceError(Exception):
    """A model source that cannot be used.

    `field`: the wrong setting, as the user wrote it (`model.source`). `reason`: CamelCase cause for conditions and
    termination messages. `message` names the value and the remedy.
    """

    def __init__(self, field: str, message: str, *, reason: str = "ModelNotFound") -> None:
        message = shortened(message)
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.reason = reason


def shortened(message: str) -> str:
    """Return a message whose quotes, between backticks, have at most `MAX_QUOTED_CHARS`."""
    message = _QUOTE.sub(lambda quote: f"`{_cut(quote[1], MAX_QUOTED_CHARS)}`", message)
    return _cut(message, MAX_MESSAGE_CHARS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class UnreadableModelError(SourceError):
    """The files exist and are truncated, corrupt or incomplete."""

    def __init__(self, message: str, field: str = "model.source") -> None:
        super().__init__(field, message, reason="ModelUnreadable")


class FetchError(SourceError):
    """A source that cannot be fetched.

    Reasons: ModelNotFound, Unauthorized, DiskFull, HubUnreachable, SourceUnreachable, SourceUnavailable,
    SourceUnsupported, SourceChanged, ModelUnreadable, ModelCorrupt, VolumeUnusable.
    """

    def __init__(
        self, reason: str, message: str, field: str = "model.source", *, retry_after_s: float | None = None
    ) -> None:
        """`retry_after_s`: the wait that the server asked for (RFC 9110, `Retry-After`)."""
        super().__init__(field, message, reason=reason)
        self.retry_after_s = retry_after_s

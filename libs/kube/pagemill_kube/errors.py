"""The errors of requests to the API server."""

from __future__ import annotations

MALFORMED = ("failed to create typed patch object", "failed to convert new object")


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (408, 409, 429) or (self.status >= 500 and not self.is_malformed)

    @property
    def is_malformed(self) -> bool:
        """Whether the manifest is invalid. Server-side apply answers 500 to a field of the wrong type or name."""
        return self.status == 422 or self.message.startswith(MALFORMED)


class Gone(ApiError):
    """The watch or the listing cannot continue from its resource version: list again."""


class Unreachable(Exception):
    """No answer arrived in time. The write may still have happened."""


class NotLeading(Exception):
    """This process may not write, or no longer."""


class CredentialsError(Exception):
    """No usable credentials for the API server; the message names the file and the remedy."""

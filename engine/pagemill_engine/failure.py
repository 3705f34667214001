"""The reason why a server process could not start or had to end, as an exception and as one JSON line.

The line is the termination message: the last line on stderr, and the file from which Kubernetes reads it if one is set.
The operator copies reason and message into the object's conditions, so both must be understandable without a log.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pagemill_servers.process.settings import full_disk_message

MAX_TERMINATION_BYTES = 4096
"""Kubernetes truncates longer termination messages."""

KUBERNETES_LOG = Path("/dev/termination-log")
"""Kubernetes' default file, which exists only in its containers; for failures before the settings are known."""


PERMANENT_REASONS = frozenset(
    {
        "DeviceUnavailable",
        "GraphsTooLarge",
        "KVCacheTooLarge",
        "KVCacheTooSmall",
        "MaxModelLenTooLarge",
        "ModelNotFound",
        "ModelTooLarge",
        "ModelUnreadable",
        "SettingsInvalid",
        "SettingsUnreadable",
        "SettingsUnsupported",
        "SourceUnavailable",
        "StepTooLarge",
        "UnsupportedArchitecture",
        "UnsupportedQuantization",
    }
)
"""Causes that another start with the same settings meets again."""


class Termination(msgspec.Struct, frozen=True, omit_defaults=True):
    reason: str
    """CamelCase cause, for programs and condition reasons."""
    message: str
    """One sentence with the remedy, for people."""
    field: str | None = None
    """The setting at fault."""
    permanent: bool = False
    """Whether another start with the same settings would fail as well; set when it is written, by the reason."""


class StartupError(Exception):
    """An error because of which the process cannot serve. Users never see its traceback."""

    def __init__(self, reason: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.termination = Termination(reason, message, field)


def disk_full(error: Exception) -> StartupError | None:
    """Return a `StartupError` if `error` was caused by a full disk, such as that of the temporary folder, or None."""
    message = full_disk_message(error) if isinstance(error, OSError) else None
    return StartupError("TemporaryFolderFull", message) if message else None


def write_termination(termination: Termination, path: str | None) -> str:
    """Return the JSON line and also write it to `path`, if given. A failure to write is ignored."""
    written = msgspec.structs.replace(
        termination,
        message=termination.message[: MAX_TERMINATION_BYTES // 4],
        permanent=termination.reason in PERMANENT_REASONS,
    )
    line = msgspec.json.encode(written).decode()
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(line)
    return line

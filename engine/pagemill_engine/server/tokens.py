"""Which tokens open `/internal/*`: that of the settings, and those of a file that may change while the server runs."""

from __future__ import annotations

from pathlib import Path

from pagemill_engine.config import ServerConfig
from pagemill_engine.server.failure import StartupError
from pagemill_protocol.secret_file import SecretFile


class InternalTokens:
    def __init__(self, server: ServerConfig) -> None:
        """Raises `StartupError` when the file cannot be read."""
        self._fixed = (server.internal_token,) if server.internal_token else ()
        self._file = _open(server.internal_tokens_file)

    def accepted(self) -> tuple[str, ...] | None:
        """All accepted tokens; `None` if none is configured. With an empty file every caller is refused."""
        if self._file is not None:
            return (*self._fixed, *self._file.lines())
        return self._fixed or None


def _open(path: str | None) -> SecretFile | None:
    if path is None:
        return None
    try:
        return SecretFile(Path(path))
    except OSError as error:
        raise StartupError(
            "TokensUnreadable",
            f"internal_tokens_file: cannot read {path}: {error.strerror}. Mount the Secret there or drop the setting.",
            "internal_tokens_file",
        ) from error

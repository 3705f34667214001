"""Internal tokens for `/internal/*` and the control port: from the settings, from a file, or created at the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pagemill_engine.config import ServerConfig
from pagemill_engine.server.failure import StartupError
from pagemill_protocol.http.guard import ControlTokens
from pagemill_protocol.token_file import TokenFileError, generated_token_file


def internal_tokens(server: ServerConfig) -> ControlTokens:
    """Return the configured internal tokens. Raises `StartupError` if their file cannot be read."""
    path = server.internal_tokens_file
    try:
        return ControlTokens(server.internal_token, Path(path) if path is not None else None, setting="internal_token")
    except OSError as error:
        raise StartupError(
            "TokensUnreadable",
            f"internal_tokens_file: cannot read {path}: {error.strerror}. Mount the Secret there or drop the setting.",
            "internal_tokens_file",
        ) from error


@contextmanager
def with_token(server: ServerConfig, address: str, port: int) -> Iterator[ServerConfig]:
    """Yield settings with a token, creating one for the block's duration if none is configured.

    `address` and `port`: those of the bound control port. Raises `StartupError` if the token cannot be written to a
    file.
    """
    if server.internal_token or server.internal_tokens_file is not None:
        yield server
        return
    try:
        with generated_token_file(address, port) as path:
            yield msgspec.structs.replace(server, internal_tokens_file=str(path))
    except TokenFileError as error:
        raise StartupError("TokensUnwritable", f"internal_token: {error}.", "internal_token") from error

"""Which tokens open the gateway's control port: configured ones, those of the cluster's keys, or one made at the start.

The guard that asks for them is `pagemill_protocol.http.guard`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pagemill_gateway.config import GatewayConfig, SettingsError
from pagemill_protocol.http.guard import ControlTokens
from pagemill_protocol.token_file import TokenFileError, made_token_file


@contextmanager
def with_control_token(config: GatewayConfig, listener: socket.socket) -> Iterator[GatewayConfig]:
    """The settings with a token while the block runs: a new one where none is configured and no cluster has one.

    `listener`: the control port. Raises `SettingsError` when the token cannot be kept in a file.
    """
    if config.has_control_token or config.discovery == "kubernetes":
        yield config
        return
    address, port = listener.getsockname()[:2]
    try:
        with made_token_file(address, port) as path:
            yield msgspec.structs.replace(config, control_token_file=str(path))
    except TokenFileError as error:
        raise SettingsError(f"control_token: {error}.") from error


def control_tokens(config: GatewayConfig, derived: Callable[[], Sequence[str]]) -> ControlTokens:
    """`derived`: from the cluster's keys, as they are now. Raises `SettingsError` when the file cannot be read."""
    file, secret = config.control_token_file, config.kubernetes.keys_secret
    of_cluster = f"the Secret {secret.namespace}/{secret.name}; in the gateway's container, `python -m "
    of_cluster += "pagemill_gateway.look PATH` asks with it"
    try:
        return ControlTokens(
            config.control_token,
            Path(file) if file is not None else None,
            setting="control_token",
            derived=derived,
            derived_from=of_cluster if config.discovery == "kubernetes" else "",
        )
    except OSError as error:
        raise SettingsError(
            f"control_token_file: cannot read {file}: {error.strerror}. Mount the Secret there or drop the setting."
        ) from error

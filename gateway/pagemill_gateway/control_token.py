"""The tokens that the gateway's control port accepts: configured ones, derived ones, or one created at the start.

`pagemill_servers.guard` checks them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pagemill_gateway.config import GatewayConfig, SettingsError
from pagemill_servers.guard import ControlTokens
from pagemill_servers.secrets.token_file import TokenFileError, generated_token_file


@contextmanager
def with_control_token(config: GatewayConfig, listener: socket.socket) -> Iterator[GatewayConfig]:
    """Yield the settings with a control token, a new one if none is configured or derived.

    `listener` is the socket of the control port. Raises `SettingsError` if the token cannot be written to a file.
    """
    if config.has_control_token or config.discovery == "kubernetes":
        yield config
        return
    address, port = listener.getsockname()[:2]
    try:
        with generated_token_file(address, port) as path:
            yield msgspec.structs.replace(config, control_token_file=str(path))
    except TokenFileError as error:
        raise SettingsError(f"control_token: {error}.") from error


def control_tokens(config: GatewayConfig, derived: Callable[[], Sequence[str]]) -> ControlTokens:
    """Return the accepted tokens. `derived` returns those of the cluster's keys.

    Raises `SettingsError` if the file of tokens cannot be read.
    """
    file, secret = config.control_token_file, config.kubernetes.keys_secret
    of_cluster = f"the Secret {secret.namespace}/{secret.name}; in the gateway's container, `python -m "
    of_cluster += "pagemill_gateway.query PATH` asks with it"
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

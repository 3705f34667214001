"""Authentication: API keys of the OpenAI routes, and internal tokens of `/internal/*` and the control port.

The OpenAI routes need an API key if there is a key file, and the internal token with `only_gateways`.

Without either, the routes are open. `pagemill_servers.keys` defines format and look-up, as for gateways. Only a
gateway enforces limits, so an entry with limits is refused here. Routes
find the caller in `request.state`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import Request

from pagemill_engine.config import ServerConfig
from pagemill_engine.failure import StartupError
from pagemill_servers.guard import ControlTokens, require_token
from pagemill_servers.keys.caller import ANONYMOUS
from pagemill_servers.keys.entries import EntryError, parse_entry
from pagemill_servers.keys.file import KeysFileError, check_keys_file, open_keys_file
from pagemill_servers.keys.ring import KeyRing
from pagemill_servers.secrets.token_file import TokenFileError, generated_token_file

if TYPE_CHECKING:
    from pagemill_engine.server.context import ServerContext

ENFORCED = "Leave it out, or serve through `pagemill gateway`, which enforces it."
Result = TypeVar("Result")


def open_keys(server: ServerConfig) -> KeyRing:
    """Open the key file, if one is set. Raises `StartupError` if it cannot be used."""
    if server.api_keys_file is None:
        return KeyRing(())
    try:
        return KeyRing((), open_keys_file(Path(server.api_keys_file), fault_of=fault_of))
    except KeysFileError as error:
        raise _unusable(error) from error


def check_keys(path: Path) -> None:
    """Check a key file. Raises `StartupError` for the first line that cannot be used."""
    try:
        check_keys_file(path, fault_of=fault_of)
    except KeysFileError as error:
        raise _unusable(error) from error


def keyed(route: Callable[[Request], Awaitable[Result]]) -> Callable[[Request], Awaitable[Result]]:
    """Require a key for a route. Callers without a key get 401 before their body is read."""

    async def guarded(request: Request) -> Result:
        context: ServerContext = request.app.state.context
        if context.settings.server.only_gateways:
            require_token(request.scope, context.tokens)
            request.state.caller = ANONYMOUS
        else:
            request.state.caller = context.keys.authenticate(request.scope)
        return await route(request)

    return guarded


def fault_of(line: str) -> str | None:
    """Return why a server without limits cannot use a line of the key file, or None."""
    try:
        caller = parse_entry(line)
    except EntryError as error:
        return str(error)
    model, limit = next(caller.declared_limits(), ("", ""))
    if limit:
        return f"has `{limit}{model and '@'}{model}`, but this server enforces no limits. {ENFORCED}"
    if caller.models is not None:
        return f"has `models`, but this server serves one model to all keys. {ENFORCED}"
    if caller.priority_class != "normal":
        return f"has `priority`, but this server has no priority classes. {ENFORCED}"
    if caller.objective is not None:
        return f"has `objective`, but this server counts no tenants' requests. {ENFORCED}"
    if caller.is_admin:
        return f"has `role`, but this server has no page for administrators. {ENFORCED}"
    return None


def _unusable(error: KeysFileError) -> StartupError:
    return StartupError("SettingsInvalid", f"`api_keys_file`: {error}", "api_keys_file")


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

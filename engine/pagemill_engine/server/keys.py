"""What the OpenAI routes ask for: API keys where a server has a file of them, the internal token behind a gateway
(`only_gateways`), else nothing.

Format and look-up are `pagemill_protocol.keys`'s, as at gateways. Limits are a gateway's: an entry that names one is
refused here, since it would not be kept. Who may call `/internal/*` is `tokens`'s. Routes find
the caller in `request.state`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from pagemill_engine.config import ServerConfig
from pagemill_engine.server.failure import StartupError
from pagemill_protocol.http.guard import require_token
from pagemill_protocol.keys.caller import ANONYMOUS
from pagemill_protocol.keys.entries import EntryError, parse_entry
from pagemill_protocol.keys.file import KeysFileError, check_keys_file, open_keys_file
from pagemill_protocol.keys.ring import KeyRing

if TYPE_CHECKING:
    from pagemill_engine.server.context import ServerContext

ENFORCED = "Leave it out, or serve through `pagemill gateway`, which keeps it."
Result = TypeVar("Result")


def open_keys(server: ServerConfig) -> KeyRing:
    """Raises `StartupError` when the file cannot be used."""
    if server.api_keys_file is None:
        return KeyRing(())
    try:
        return KeyRing((), open_keys_file(Path(server.api_keys_file), fault_of=fault_of))
    except KeysFileError as error:
        raise _unusable(error) from error


def check_keys(path: Path) -> None:
    """Raises `StartupError` for the first line that cannot be used."""
    try:
        check_keys_file(path, fault_of=fault_of)
    except KeysFileError as error:
        raise _unusable(error) from error


def keyed(route: Callable[[Request], Awaitable[Result]]) -> Callable[[Request], Awaitable[Result]]:
    """The route for those who have a key; others get 401 before their body is read."""

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
    """What is wrong with a line for a server without limits; `None`: nothing."""
    try:
        caller = parse_entry(line)
    except EntryError as error:
        return str(error)
    limit = next((name for name, value in caller.limits._asdict().items() if value is not None), None)
    if limit is not None:
        return f"has `{limit}`, and this server keeps no limits. {ENFORCED}"
    if caller.models is not None:
        return f"has `models`, and this server serves each key the one model it has. {ENFORCED}"
    if caller.priority_class != "normal":
        return f"has `priority`, and this server knows no classes of keys. {ENFORCED}"
    return None


def _unusable(error: KeysFileError) -> StartupError:
    return StartupError("SettingsInvalid", f"`api_keys_file`: {error}", "api_keys_file")

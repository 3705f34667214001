"""The guard of control ports: probes and scrapes are open, all other routes require a token and refuse web pages.

A page in a browser can send requests to every port of its user's machine, and read the answers once its own name
resolves to that machine (DNS rebinding). So a guarded request must not come from a page of another origin, must name
a host that no page can have, and must carry a token, which a page does not know. Engine and gateway wrap their
control apps in `ControlGuard`, inside `request_middleware`, and data apps without authentication in `HostGuard`.
`token_file` makes the tokens of servers without a configured one.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill_protocol.errors import unauthorized
from pagemill_servers.auth import bearer_token, is_loopback, same_secret
from pagemill_servers.direct import count_for_tenant
from pagemill_servers.origin import check_same_origin, forbidden, header_values, shown
from pagemill_servers.secrets.secret_file import SecretFile

OPEN_PATHS = frozenset({"/livez", "/readyz", "/metrics", "/version"})
OPEN_METHODS = frozenset({"GET", "HEAD"})
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc")
"""Suffixes of names that public DNS cannot contain, such as Services of Kubernetes in their cluster's domain."""
_HOST = re.compile(r"\[(?P<v6>[0-9a-fA-F:.]+)\](:\d*)?|(?P<name>[^\s:@/?#\[\]\\]+)(:\d*)?")


class ControlTokens:
    """The tokens that the guarded routes of one server accept, and where its user finds them."""

    def __init__(
        self,
        token: str = "",
        file: Path | None = None,
        *,
        setting: str,
        derived: Callable[[], Sequence[str]] = tuple,
        derived_from: str = "",
    ) -> None:
        """Collect the tokens. Raises `OSError` when the file cannot be read.

        `setting`: name of the setting that `token` comes from. `file`: file of further tokens, read again when it
        changes.
        `derived`: returns further tokens; `derived_from` names their source in refusals.
        """
        self._fixed = (token,) if token else ()
        self._path = file
        self._file = SecretFile(file) if file is not None else None
        self._setting = setting
        self._derived = derived
        self._derived_from = derived_from

    def accepted(self) -> tuple[str, ...]:
        """Return all accepted tokens. Without any, every guarded request is refused."""
        return (*self._fixed, *(self._file.lines() if self._file is not None else ()), *self._derived())

    def where(self, *, local: bool) -> str:
        """Return a sentence that says where the token is. `local`: the caller is on this machine and may see a path."""
        if self._path is not None:
            return f"It is in {self._path}." if local else "It is in a file on the server's machine."
        if self._derived_from:
            return f"It is derived from {self._derived_from}."
        return f"It is what the server's setting `{self._setting}` says."


class ControlGuard:
    """ASGI middleware of control apps; put it inside `RequestMiddleware`, which renders its refusals."""

    def __init__(self, app: ASGIApp, tokens: ControlTokens, allowed_hosts: Collection[str] = ()) -> None:
        """Wrap an app. `allowed_hosts`: names of this server in the header Host, beside those that every server has."""
        self._app = app
        self._tokens = tokens
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            require_control(scope, self._tokens, self._allowed_hosts)
        await self._app(scope, receive, send)


class HostGuard:
    """ASGI middleware, inside `RequestMiddleware`, for the data port of a server on loopback without authentication.

    A page whose name resolves to this machine could otherwise use the models and read the answers. It is not needed
    with API keys, which a page does not have, nor beyond loopback, where the port is open to all by the user's choice.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            check_host(scope, self._allowed_hosts, "allowed_hosts")
        await self._app(scope, receive, send)


def require_control(scope: Scope, tokens: ControlTokens, allowed_hosts: Collection[str] = ()) -> None:
    """Accept requests of programs with a token.

    Raises `PagemillError` 403 for web pages and foreign hosts, else 401.
    """
    check_same_origin(scope, "send it from a program, without that header")
    check_host(scope, allowed_hosts, "control_allowed_hosts")
    require_token(scope, tokens)


def check_host(scope: Scope, allowed_hosts: Collection[str], setting: str) -> None:
    """Raise `PagemillError` 403 for a request to a host name that a web page can have.

    `setting`: name of the setting with further host names, for the message.
    """
    for host in header_values(scope, b"host"):
        if not _is_own_host(host, allowed_hosts):
            raise forbidden(
                f"The header Host names {shown(host)}, which is not known as a name of this server. Call it by its IP "
                f"address or as localhost, or add the name to the setting `{setting}`.",
                "foreign_host",
            )


def require_token(scope: Scope, tokens: ControlTokens) -> None:
    """Raise `PagemillError` 401 for a request without an accepted token.

    All accepted tokens are compared, so that the time reveals nothing.
    """
    given = bearer_token(scope)
    matches = [given is not None and same_secret(given, token) for token in tokens.accepted()]
    if any(matches):
        return count_for_tenant(scope, None)
    fault = "and the request has none" if given is None else "and the one in the request is not accepted"
    raise unauthorized(
        f"This route needs the control token in the header `Authorization: Bearer TOKEN`, {fault}. "
        f"{tokens.where(local=is_loopback(scope))}"
    )


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and scope["method"] in OPEN_METHODS


def _is_own_host(host: str, allowed_hosts: Collection[str]) -> bool:
    """Whether the host is an IP address, a name that no public DNS zone can contain, or a name of this server.

    The port is ignored, since ports may be forwarded.
    """
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    if _is_address(match["v6"] or match["name"]):
        return True
    name = (match["name"] or "").lower().rstrip(".")
    own = {socket.gethostname().lower(), *(each.lower() for each in allowed_hosts)}
    return name in own or (bool(name) and ("." not in name or name.endswith(PRIVATE_SUFFIXES)))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

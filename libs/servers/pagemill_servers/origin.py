"""Check which web page a request comes from, if any. `guard` and `request_middleware` refuse pages of other origins."""

from __future__ import annotations

from starlette.types import Scope

from pagemill_protocol.errors import PagemillError

MAX_SHOWN_CHARS = 80


def check_same_origin(scope: Scope, remedy: str) -> None:
    """Raise `PagemillError` 403 for a request of a web page with another origin than this server."""
    hosts = header_values(scope, b"host")
    for origin in header_values(scope, b"origin"):
        if not _is_same_origin(origin, hosts):
            raise forbidden(
                f"The request comes from a web page of {shown(origin)} (header Origin), and such pages may not use "
                f"this route so; {remedy}.",
                "foreign_origin",
            )


def header_values(scope: Scope, name: bytes) -> list[str]:
    """Return all values of that lower-case header name, since a request may repeat the header."""
    return [bytes(value).decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def forbidden(message: str, code: str) -> PagemillError:
    return PagemillError(message, status=403, type="permission_error", code=code)


def shown(text: str) -> str:
    return ascii(text[:MAX_SHOWN_CHARS])


def _is_same_origin(origin: str, hosts: list[str]) -> bool:
    scheme, separator, authority = origin.partition("://")
    return scheme in ("http", "https") and bool(separator) and [authority.lower()] == [host.lower() for host in hosts]

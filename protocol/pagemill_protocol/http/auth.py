"""Who may call: bearer tokens compared in constant time, and the loopback rule of unguarded control routes.

Keys are known by their SHA-256 only. Which API keys there are, and what each may have, is the gateway's (`limits`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection

from starlette.types import Scope

from pagemill_protocol.errors import PagemillError, unauthorized

MAX_KEY_CHARS = 512


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def bearer_token(scope: Scope) -> str | None:
    """The token of `Authorization: Bearer TOKEN`; `None` when there is none."""
    value = header(scope, b"authorization")
    if value is None:
        return None
    scheme, _, token = value.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= MAX_KEY_CHARS else None


def same_secret(given: str, expected: str) -> bool:
    """Compare in time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


def hash_key(key: str) -> str:
    """How an API key is stored: hex SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def require_internal(scope: Scope, tokens: Collection[str] | None) -> None:
    """Accept only callers with one of `tokens`; `None`: no token is configured, only loopback peers are accepted.

    Every token is compared, so timing reveals nothing. Raises `PagemillError`.
    """
    if tokens is not None:
        given = bearer_token(scope)
        matches = [given is not None and same_secret(given, token) for token in tokens]
        if not any(matches):
            raise unauthorized("This route needs the internal token in the header `Authorization: Bearer TOKEN`.")
        return
    if not is_loopback(scope):
        raise PagemillError(
            "This route answers callers on the same machine only; configure an internal token to open it.",
            status=403,
            type="permission_error",
            code="forbidden",
        )


def is_loopback(scope: Scope) -> bool:
    """Whether the peer is on this machine; Unix sockets, which have no address, count as such."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False

"""Who calls: bearer tokens, compared in constant time, and whether the peer is on this machine.

Keys are known by their SHA-256 only. Which API keys there are, and what each may have, is the gateway's (`limits`);
which tokens open control routes is decided in `guard`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.types import Scope

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


def api_key(scope: Scope) -> str | None:
    """The bearer token, or the header `x-api-key` that clients of Anthropic's API send."""
    token = bearer_token(scope)
    if token is not None:
        return token
    value = header(scope, b"x-api-key")
    return value if value is not None and 0 < len(value) <= MAX_KEY_CHARS else None


def same_secret(given: str, expected: str) -> bool:
    """Compare in time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


def hash_key(key: str) -> str:
    """How an API key is stored: hex SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def is_loopback_address(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_loopback(scope: Scope) -> bool:
    """Whether the peer is on this machine; Unix sockets, which have no address, count as such."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False

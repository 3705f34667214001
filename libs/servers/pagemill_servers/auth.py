"""Read a caller's credentials: bearer tokens, compared in constant time, and whether the peer is on this machine.

Only the SHA-256 of an API key is stored. The gateway (`limits`) defines API keys and their limits; `guard` decides
which tokens are accepted by control routes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.types import Scope

from pagemill_protocol.errors import unauthorized

MAX_KEY_CHARS = 512


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of that lower-case name, or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def bearer_token(scope: Scope) -> str | None:
    """Return the token of `Authorization: Bearer TOKEN`, or None."""
    value = header(scope, b"authorization")
    if value is None:
        return None
    scheme, _, token = value.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= MAX_KEY_CHARS else None


def api_key(scope: Scope) -> str | None:
    """Return the bearer token, or else the header `x-api-key` that clients of Anthropic's API send.

    Raises `PagemillError` 401 if the request has both and they differ.
    """
    token, value = bearer_token(scope), header(scope, b"x-api-key")
    key = value if value is not None and 0 < len(value) <= MAX_KEY_CHARS else None
    if token is not None and key is not None and not same_secret(token, key):
        raise unauthorized(
            "The headers `Authorization` and `x-api-key` have two different keys. Send one of the headers, or the same "
            "key in both."
        )
    return key if token is None else token


def same_secret(given: str, expected: str) -> bool:
    """Compare two secrets in time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


def hash_key(key: str) -> str:
    """Return the stored form of an API key: hex SHA-256."""
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
    """Whether the peer is on this machine; peers on Unix sockets, which have no address, are."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False

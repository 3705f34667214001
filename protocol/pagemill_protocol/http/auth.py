"""Who may call: bearer tokens compared in constant time, and the loopback rule of unguarded control routes.

Keys are known by their SHA-256 only. It decides nothing about budgets or models; the gateway's limits do.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Iterable

from starlette.types import Scope

from pagemill_protocol.errors import PagemillError, unauthorized
from pagemill_protocol.secret_file import SecretFile

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


class KeyRing:
    """The API keys a gateway accepts, by hash: fixed ones and those of a file. Without either it accepts everybody."""

    def __init__(self, key_hashes: Iterable[str], file: SecretFile | None = None) -> None:
        self._hashes = tuple(key_hash.lower() for key_hash in key_hashes)
        self._file = file

    @property
    def open(self) -> bool:
        return not self._hashes and self._file is None

    def authenticate(self, scope: Scope) -> str | None:
        """The hash of the caller's key, `None` when the ring is open. Raises `PagemillError` 401.

        Every known hash is compared, so the time tells nothing about which one came close.
        """
        if self.open:
            return None
        token = bearer_token(scope)
        given = hash_key(token) if token is not None else ""
        found: str | None = None
        for known in self._known():
            if hmac.compare_digest(known.encode("ascii", "replace"), given.encode("ascii")):
                found = known
        if token is None or found is None:
            raise unauthorized()
        return found

    def _known(self) -> tuple[str, ...]:
        if self._file is None:
            return self._hashes
        return self._hashes + tuple(line.lower() for line in self._file.lines())


def require_internal(scope: Scope, tokens: Collection[str] | None) -> None:
    """Let only holders of one of `tokens` pass; `None`: no guard is configured, only loopback peers may pass.

    Every token is compared, so the time tells nothing. Raises `PagemillError`.
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

"""Tokens between gateways and engines, derived from one secret key, so that no token has to be distributed.

An engine accepts the tokens of all keys in `pagemill-keys`; a gateway sends the token of `current`. The operator
rotates the keys (`previous` <- `current` <- `next` <- random), so every token is accepted for a whole period before it
is used. The operator and the gateway store and watch the keys; this module only derives tokens.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

DOMAIN = b"pagemill.dev/engine-token/v1"
KEY_BYTES = 32
MIN_KEY_BYTES = 16
CURRENT, NEXT, PREVIOUS = "current", "next", "previous"
"""Data keys of the Secret."""
GATEWAY_CONTROL = ("", "gateway-control")
"""Namespace and name of the gateways' own control token; no deployment can have the empty namespace."""


class EngineKeys(NamedTuple):
    """The three keys; `previous` equals `current` until the first rotation."""

    current: bytes
    next: bytes
    previous: bytes

    def sent(self, namespace: str, name: str) -> str:
        """Return the token that a caller sends to `namespace/name`."""
        return derive_token(self.current, namespace, name)

    def accepted(self, namespace: str, name: str) -> tuple[str, ...]:
        """Return the tokens that `namespace/name` accepts, newest first."""
        keys = (self.next, self.current, self.previous)
        return tuple(dict.fromkeys(derive_token(key, namespace, name) for key in keys))


def derive_token(key: bytes, namespace: str, name: str) -> str:
    """Return the token of one deployment under one key: 64 hex characters.

    Raises `ValueError` for a key too short to be secret, or a name that could be mistaken for another.
    """
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"key: {len(key)} bytes are too few for a secret; use at least {MIN_KEY_BYTES}")
    if "\0" in namespace or "\0" in name:
        raise ValueError(f"a NUL in {namespace!r}/{name!r}: no Kubernetes name has one")
    message = b"\0".join((DOMAIN, namespace.encode(), name.encode()))
    return hmac.new(key, message, hashlib.sha256).hexdigest()

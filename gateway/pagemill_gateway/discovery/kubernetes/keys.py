"""The keys that tokens are derived from, out of their Secret."""

from __future__ import annotations

import base64
import binascii

from pagemill_gateway.discovery.kubernetes.objects import Secret
from pagemill_protocol.engine_token import CURRENT, MIN_KEY_BYTES, NEXT, PREVIOUS, EngineKeys


class KeysError(ValueError):
    """The Secret does not hold what it should; the message never shows what it holds."""


def keys_of(secret: Secret) -> EngineKeys:
    """Raises `KeysError`. Where only `current` exists, it stands for all three."""
    data = secret.data or {}
    current = _key(data, CURRENT)
    if current is None:
        raise KeysError(f"it has no `{CURRENT}`")
    return EngineKeys(current, _key(data, NEXT) or current, _key(data, PREVIOUS) or current)


def _key(data: dict[str, str], name: str) -> bytes | None:
    text = data.get(name)
    if not text:
        return None
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise KeysError(f"`{name}` is no base64") from None
    if len(key) < MIN_KEY_BYTES:
        raise KeysError(f"`{name}` has {len(key)} bytes; at least {MIN_KEY_BYTES} make a secret")
    return key

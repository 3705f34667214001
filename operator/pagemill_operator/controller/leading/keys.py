"""The keys from which engine tokens are derived: one Secret, created and rotated by the leader.

It has three keys: `next` is accepted before it is used, `current` is used, `previous` is still accepted. A rotation
moves each one on. Engines accept tokens of all three and gateways send the one of `current`, so that a rotation never
makes a request fail.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError
from pagemill_operator.backends.kubernetes.kinds import SECRET
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, Manifest
from pagemill_protocol.engine_token import KEY_BYTES, MIN_KEY_BYTES, EngineKeys

logger = logging.getLogger("pagemill.operator.keys")

ROTATED_AT = "pagemill.dev/rotated-at"


class Keys(NamedTuple):
    keys: EngineKeys
    rotated_at: datetime

    def rotated(self, now: datetime) -> Keys:
        keys = EngineKeys(current=self.keys.next, next=secrets.token_bytes(KEY_BYTES), previous=self.keys.current)
        return Keys(keys, now)

    def age_s(self, now: datetime) -> float:
        return (now - self.rotated_at).total_seconds()


def new_keys(now: datetime) -> Keys:
    current = secrets.token_bytes(KEY_BYTES)
    return Keys(EngineKeys(current=current, next=secrets.token_bytes(KEY_BYTES), previous=current), now)


def read_keys(secret: Manifest) -> Keys | None:
    """Return the keys of the Secret, or None if it has no usable ones."""
    data = secret.get("data") or {}
    try:
        keys = EngineKeys(**{name: base64.b64decode(data[name], validate=True) for name in EngineKeys._fields})
        rotated_at = datetime.fromisoformat(secret["metadata"].get("annotations", {})[ROTATED_AT])
    except (KeyError, ValueError):
        return None
    if min(map(len, keys)) < MIN_KEY_BYTES or rotated_at.tzinfo is None:
        return None
    return Keys(keys, rotated_at)


class ClusterKeys:
    """The keys of the cluster. `on_change` is called when they have changed."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        rotation_s: float,
        *,
        on_change: Callable[[], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._rotation_s = rotation_s
        self._on_change = on_change
        self._now = now
        self.keys: Keys | None = None
        """None until the keys are created or seen."""
        self.missing = asyncio.Event()
        """Set if the Secret is gone or cannot be read: it must be created at once."""
        self._version = 0

    def observe(self, event_type: str | None, secret: Manifest) -> None:
        """Take over a Secret that a watch reported."""
        metadata = secret["metadata"]
        version = int(metadata["resourceVersion"])
        if (metadata["namespace"], metadata["name"]) != (self._namespace, self._name) or version < self._version:
            return
        self._version = version
        keys = read_keys(secret) if event_type != "DELETED" else None
        if keys is None:
            self.missing.set()
        else:
            self._take(keys)

    async def rotate(self) -> float:
        """Create or rotate the keys if that is due; return the seconds until the next rotation."""
        self.missing.clear()
        secret = await self._client.find(SECRET, self._namespace, self._name)
        now = self._now().replace(microsecond=0)
        keys = read_keys(secret) if secret else None
        if keys is None:
            # Engines and gateways use the earlier keys: with new ones they would reject each other.
            keys = await self._write(self.keys or new_keys(now), secret)
            logger.info("wrote the keys for engine tokens to Secret %s/%s", self._namespace, self._name)
        elif keys.age_s(now) >= self._rotation_s:
            keys = await self._write(keys.rotated(now), secret)
            logger.info("rotated the keys for engine tokens")
        self._take(keys)
        return max(1.0, self._rotation_s - keys.age_s(now))

    def _take(self, keys: Keys) -> None:
        if keys != self.keys:
            self.keys = keys
            self._on_change()

    async def _write(self, keys: Keys, before: Manifest | None) -> Keys:
        manifest = _manifest(keys, self._namespace, self._name)
        if before is None:
            try:
                written = await self._client.create(SECRET, manifest)
            except ApiError as error:
                # Another process has created the Secret in the meantime: its keys apply, and the next try reads them.
                logger.warning("the keys could not be created: %s", error)
                raise
            return self._wrote(keys, written)
        # The precondition keeps two leaders from overwriting each other's rotation.
        manifest["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        return self._wrote(keys, await self._client.merge(SECRET, self._namespace, self._name, manifest))

    def _wrote(self, keys: Keys, secret: Manifest) -> Keys:
        """Note the written version, so that watch events of earlier versions are ignored."""
        self._version = max(self._version, int(secret["metadata"]["resourceVersion"]))
        return keys


def _manifest(keys: Keys, namespace: str, name: str) -> Manifest:
    data = {field: base64.b64encode(key).decode() for field, key in keys.keys._asdict().items()}
    rotated_at = keys.rotated_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {
        "namespace": namespace,
        "name": name,
        "labels": {MANAGED_BY_LABEL: "pagemill-operator", "app.kubernetes.io/part-of": "pagemill"},
        "annotations": {ROTATED_AT: rotated_at},
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}

"""Reads the API server's audit log: which user wrote what, and when. Only the one-node cluster has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

WRITES = {"create", "update", "patch", "delete", "deletecollection"}
POD_NAME = "authentication.kubernetes.io/pod-name"


@dataclass(frozen=True)
class Call:
    """One finished API request."""

    at: datetime
    user: str
    pod: str
    """Name of the pod whose service account token was used; empty for others."""
    verb: str
    resource: str
    """Such as `deployments` or `llmdeployments/status`."""
    namespace: str
    name: str
    code: int

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES


@dataclass
class AuditLog:
    """The calls since a moment: create the object, act, then read the calls."""

    path: Path
    offset: int = 0

    def mark(self) -> None:
        """Ignore all calls until now."""
        self.offset = self.path.stat().st_size

    def calls(self) -> list[Call]:
        assert self.path.stat().st_size >= self.offset, f"{self.path} was replaced: its calls are lost"
        with self.path.open("rb") as log:
            log.seek(self.offset)
            return list(_calls(log.read()))

    def writes(self, user: str = "", pod: str = "") -> list[Call]:
        """Return accepted writes of users whose name contains `user`, made from the pod `pod`."""
        return [
            call
            for call in self.calls()
            if call.is_write and call.code < 400 and user in call.user and pod in ("", call.pod)
        ]


def _calls(text: bytes) -> Iterator[Call]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line is still being written
        if event.get("stage") == "ResponseComplete":
            yield _call(event)


def _call(event: dict[str, Any]) -> Call:
    reference = event.get("objectRef", {})
    resource = "/".join(filter(None, [reference.get("resource", ""), reference.get("subresource", "")]))
    return Call(
        at=datetime.fromisoformat(event["requestReceivedTimestamp"].replace("Z", "+00:00")),
        user=event["user"].get("username", ""),
        pod=next(iter(event["user"].get("extra", {}).get(POD_NAME, [])), ""),
        verb=event["verb"],
        resource=resource,
        namespace=reference.get("namespace", ""),
        name=reference.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
    )

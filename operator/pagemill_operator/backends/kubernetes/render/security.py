"""Security contexts that meet the restricted Pod Security profile and go a little beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pod_security(ids: Mapping[Any, int]) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        **ids,
        # Kubernetes does not walk through a volume full of weights at every start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }

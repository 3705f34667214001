"""The address of the API server from the environment that kubelets give to every pod."""

from __future__ import annotations

import os


def in_cluster_url() -> str:
    """Return the API server's address, which needs no DNS."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return "https://kubernetes.default.svc"
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

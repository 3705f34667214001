"""What kubelets give to every pod: the address of the API server."""

from __future__ import annotations

import os


def in_cluster_url() -> str:
    """The API server's address as kubelets give it to every pod; it needs no DNS."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return "https://kubernetes.default.svc"
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

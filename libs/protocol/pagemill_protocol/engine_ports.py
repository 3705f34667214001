"""The ports of an engine's pod in a cluster, and which of them use TLS.

TLS has ports of its own, so that pods with and without it can run side by side while a rollout turns it on or off. The
operator assigns them to engines (`pagemill_operator.backends.kubernetes.render`); gateways find them in EndpointSlices.
"""

from __future__ import annotations

DATA_PORT, CONTROL_PORT = 8000, 8001
TLS_DATA_PORT, TLS_CONTROL_PORT = 8443, 8444
RENDEZVOUS_PORT = 29501
"""Where the ranks of other nodes or pods find rank 0."""


def engine_url(address: str, port: int) -> str:
    """Return the base URL of a port of a pod; `address` is an IP address of either family."""
    scheme = "https" if port in (TLS_DATA_PORT, TLS_CONTROL_PORT) else "http"
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{port}"

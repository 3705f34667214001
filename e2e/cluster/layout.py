"""Paths and addresses of the one-node cluster. The module starts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

HOME = Path("/var/lib/pagemill-e2e")
RUN = HOME / "run"
"""Everything that a running cluster stores on disk; `down` removes it."""
IMAGES = HOME / "images"
"""containerd's store. It survives `down`, so that six gigabytes are unpacked only once."""
VOLUMES = RUN / "volumes"
AUDIT_LOG = RUN / "audit.log"
KUBECONFIG = RUN / "admin.conf"
KEPT = RUN / "kept"
"""Marks a cluster that `make up-kubernetes` started, which no test may end."""

BRIDGE = "pagemill-e2e"
NODE = "node1"


class Family(NamedTuple):
    """The addresses of one family."""

    node_ip: str
    pod_range: str
    first_pod_ip: str
    service_range: str
    kubernetes_service_ip: str
    anywhere: str


_FAMILIES = {
    "IPv4": Family("10.200.0.1", "10.200.0.0/24", "10.200.0.10", "10.96.0.0/16", "10.96.0.1", "0.0.0.0/0"),
    "IPv6": Family("fd00:200::1", "fd00:200::/64", "fd00:200::10", "fd00:96::/112", "fd00:96::1", "::/0"),
}
FAMILIES = [_FAMILIES[name] for name in os.environ.get("E2E_FAMILIES", "IPv4").split(",")]
"""`E2E_FAMILIES`: `IPv4`, `IPv6`, or both with the first one of pods and Services first."""
NODE_IP = FAMILIES[0].node_ip
"""The bridge's first address, used by the node, the API server and the DNS server."""
API_PORT = 6443
CONTAINERD_SOCKET = RUN / "containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"
STORAGE_CLASS = "standard"
PROVISIONER = "pagemill.dev/host-path"

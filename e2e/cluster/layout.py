"""Paths and addresses of the one-node cluster. The module starts nothing."""

from __future__ import annotations

from pathlib import Path

HOME = Path("/var/lib/pagemill-e2e")
RUN = HOME / "run"
"""Everything that a running cluster stores on disk; `down` removes it."""
IMAGES = HOME / "images"
"""containerd's store. It survives `down`, so that six gigabytes are unpacked only once."""
VOLUMES = RUN / "volumes"
AUDIT_LOG = RUN / "audit.log"
KUBECONFIG = RUN / "admin.conf"

BRIDGE = "pagemill-e2e"
NODE = "node1"
NODE_IP = "10.200.0.1"
"""The bridge's address, used by the node, the API server and the DNS server."""
POD_RANGE = "10.200.0.0/24"
FIRST_POD_IP = "10.200.0.10"
SERVICE_RANGE = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
API_PORT = 6443
CONTAINERD_SOCKET = RUN / "containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"
STORAGE_CLASS = "standard"
PROVISIONER = "pagemill.dev/host-path"

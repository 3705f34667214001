"""Nodes that exist only as objects (KWOK), with 8 GPUs each; their pods become Ready as soon as they are scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.clusters import program
from support.objects import Document

GPU_PRODUCT = "NVIDIA-H100-80GB-HBM3"
PLACED: Document = {
    "nodeSelector": {"type": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
}
"""Fields of a pod's spec that place it on hollow nodes only."""


@contextmanager
def nodes(count: int) -> Iterator[None]:
    """Add `count` simulated nodes while the block runs; only for the one-node cluster."""
    program("hollow", str(count))
    try:
        yield
    finally:
        program("hollow", "0")

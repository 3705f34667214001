"""Adds nodes that exist only as objects, for scale tests; KWOK simulates them and their pods."""

from __future__ import annotations

from typing import Any

import binaries
import one_node
import parts
import processes
from layout import RUN

CAPACITY = {"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
GPU_PRODUCT = "nvidia.com/gpu.product"
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}


def add_nodes(count: int) -> None:
    """Start KWOK if needed, and add `count` hollow nodes."""
    _start_kwok()
    nodes = [node(number) for number in range(count)]
    one_node.kubectl("apply", "--server-side", "-f", "-", manifest={"apiVersion": "v1", "kind": "List", "items": nodes})


def remove_nodes() -> None:
    one_node.kubectl("delete", "nodes", "-l", "type=kwok", "--ignore-not-found")
    processes.stop(RUN, "kwok")


def node(number: int) -> dict[str, Any]:
    """Return a node with a taint, so that only pods that tolerate it are placed there."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"hollow-{number}",
            "labels": {
                "type": "kwok",
                "kubernetes.io/hostname": f"hollow-{number}",
                GPU_PRODUCT: "NVIDIA-H100-80GB-HBM3",
            },
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": CAPACITY, "capacity": CAPACITY},
    }


def _start_kwok() -> None:
    running = processes.started(RUN).get("kwok")
    if running is not None and processes.is_running(running):
        return
    binaries.build(["kwok"])
    argv = [str(binaries.bin_dir() / "kwok"), f"--kubeconfig={parts.kubeconfig('e2e:kwok')}"]
    argv += ["--manage-all-nodes=false", "--manage-nodes-with-label-selector=type=kwok"]
    stages = sorted((binaries.share_dir() / "kwok").glob("*.yaml"))
    processes.start(RUN, "kwok", [*argv, *(f"--config={stage}" for stage in stages)])

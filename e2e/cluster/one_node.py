"""Starts and stops a real one-node Kubernetes, and kills and restarts its components individually.

etcd, API server, controller manager, scheduler, kubelet, containerd, kube-proxy and CoreDNS run as plain processes of
this machine, and pods as containers on one bridge; no port is reachable from other machines. A machine can run one such
cluster. `parts` has the command lines, `host` prepares the machine, `images` and `loading` provide the pods' images.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import api_only
import binaries
import containers
import host
import loading
import parts
import processes
from layout import IMAGES, KUBECONFIG, NODE, PROVISIONER, RUN, STORAGE_CLASS, VOLUMES

READY_TIMEOUT_S = 90.0
DEFAULT_STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": PROVISIONER,
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "Immediate",
}


def up() -> None:
    """Start the cluster; return once pods can be scheduled, after some seconds."""
    host.check()
    binaries.require(binaries.USUAL)
    if processes.started(RUN):
        raise api_only.ClusterError("The cluster already runs; stop it first: python3 e2e/cluster down")
    down()  # removes what an interrupted run may have left
    for folder in (RUN, IMAGES, VOLUMES):
        folder.mkdir(parents=True, exist_ok=True)
    RUN.chmod(0o711)
    try:
        host.prepare()
        parts.configure()
        _start_all()
    except BaseException:
        _end_all()
        raise


def down() -> None:
    """End every process and container and restore the machine; loaded images stay for the next cluster."""
    _end_all()
    shutil.rmtree(RUN, ignore_errors=True)


def is_running() -> bool:
    """Whether a cluster was started here whose components all run."""
    started = processes.started(RUN)
    return bool(started) and all(processes.is_running(each) for each in started.values())


def start(name: str) -> None:
    """Start a component that `stop` killed."""
    running = processes.started(RUN).get(name)
    if running is None or not processes.is_running(running):
        env = {**os.environ, "PATH": f"{binaries.bin_dir()}:{host.PATH}"}
        processes.start(RUN, name, parts.argv(name), env)


def stop(name: str) -> None:
    """Kill a component as a crash does; pods and everything else continue."""
    processes.stop(RUN, name)


def fake_gpus(count: int) -> None:
    """Make the node offer this many `nvidia.com/gpu`, for accounting only; there is no device."""
    value = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
    kubectl("patch", "node", NODE, "--subresource=status", "--type=json", "-p", json.dumps(value))


def kubectl(*arguments: str, manifest: Any = None) -> str:
    """Run kubectl as administrator. Raise `ClusterError` if it fails."""
    argv = [str(binaries.bin_dir() / "kubectl"), "--kubeconfig", str(KUBECONFIG), *arguments]
    stdin = None if manifest is None else json.dumps(manifest)
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        raise api_only.ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _start_all() -> None:
    for name in ("etcd", "containerd", "kube-apiserver"):
        start(name)
    api_only.wait_ready(RUN, KUBECONFIG, READY_TIMEOUT_S)
    for name in parts.START_ORDER:
        start(name)
    wait("containerd", _containerd_answers)
    loading.load_pause()
    kubectl("apply", "--server-side", "-f", "-", manifest=DEFAULT_STORAGE_CLASS)
    wait(f"node {NODE}", lambda: "True" in kubectl("get", "node", NODE, "-o", f"jsonpath={READY_STATUS}"))
    wait("the default service account", lambda: bool(kubectl("get", "serviceaccount", "default", "-o", "name")))


READY_STATUS = '{.status.conditions[?(@.type=="Ready")].status}'


def _containerd_answers() -> bool:
    containers.ctr("version")
    return True


def wait(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except (api_only.ClusterError, containers.ContainerError):
            pass  # not ready yet
        time.sleep(0.2)
    logs = "\n".join(f"--- {name}\n{processes.log_tail(RUN, name)[-800:]}" for name in processes.started(RUN))
    raise api_only.ClusterError(f"{what} is not ready after {READY_TIMEOUT_S:.0f} s:\n{logs}")


def _end_all() -> None:
    """End all processes: the kubelet first, which would restart containers, and containerd last."""
    for name in reversed(processes.started(RUN)):
        if name != "containerd":
            processes.stop(RUN, name)
    containers.end_all()
    try:
        containers.forget_all()
    except (containers.ContainerError, FileNotFoundError) as error:
        if "containerd" in processes.started(RUN):
            sys.stderr.write(f"e2e/cluster: records of containers stay until the next start: {error}\n")
    processes.stop(RUN, "containerd")
    shutil.rmtree(IMAGES / "io.containerd.grpc.v1.cri", ignore_errors=True)
    host.restore()

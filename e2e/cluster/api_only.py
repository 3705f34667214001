"""Starts and stops a Kubernetes API server with its etcd, on free loopback ports, as the calling user.

It is a real API server without nodes: admission, validation, defaulting, subresources and watches are real; no
component schedules or runs pods (`one_node` does). All state is in one folder, so any number can run concurrently;
`down` removes the folder.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import binaries
import credentials
import processes

READY_TIMEOUT_S = 90.0


class ClusterError(Exception):
    """Raised if the cluster did not start; the message contains the end of the failed program's log."""


def up(state: Path) -> Path:
    """Start etcd and kube-apiserver in `state`; return the path of the kubeconfig once the server is ready."""
    binaries.require(binaries.API_ONLY)
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)  # The kubeconfig will contain an administrator's token.
    if processes.started(state):
        raise ClusterError(
            f"A cluster already uses {state}; stop it first: python3 e2e/cluster down --api-only {state}"
        )
    client_port, peer_port, api_port = _free_ports(3)
    credentials.make_certificate(state / "apiserver", ["DNS:localhost", "IP:127.0.0.1"])
    tokens = credentials.make_tokens(state / "tokens.csv", {"admin": ["system:masters"]})
    kubeconfig = credentials.write_kubeconfig(
        state / "kubeconfig",
        server=f"https://127.0.0.1:{api_port}",
        authority=state / "apiserver.crt",
        token=tokens["admin"],
    )
    try:
        _start(state, "etcd", _etcd_flags(state, client_port, peer_port))
        _start(state, "kube-apiserver", _apiserver_flags(state, client_port, api_port))
        wait_ready(state, kubeconfig, READY_TIMEOUT_S)
    except BaseException:
        down(state, keep_logs=True)
        raise
    return kubeconfig


def down(state: Path, *, keep_logs: bool = False) -> None:
    """Stop what `up` started in this folder, the API server first, and remove the folder."""
    for name in reversed(processes.started(state)):
        processes.stop(state, name)
    if not keep_logs:
        shutil.rmtree(state, ignore_errors=True)


def wait_ready(state: Path, kubeconfig: Path, timeout_s: float) -> None:
    """Wait until the API server is ready. Raise `ClusterError` with its log if a process ended or the time is up."""
    kubectl = [str(binaries.bin_dir() / "kubectl"), "--kubeconfig", str(kubeconfig)]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for name, process in processes.started(state).items():
            if not processes.is_running(process):
                raise ClusterError(f"{name} ended at start:\n{processes.log_tail(state, name)}")
        if subprocess.run([*kubectl, "get", "--raw", "/readyz"], capture_output=True).returncode == 0:
            return
        time.sleep(0.2)
    raise ClusterError(f"not ready after {timeout_s:.0f} s:\n{processes.log_tail(state, 'kube-apiserver')}")


def _start(state: Path, name: str, flags: list[str]) -> None:
    processes.start(state, name, [str(binaries.bin_dir() / name), *flags])


def _etcd_flags(state: Path, client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={state / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _apiserver_flags(state: Path, etcd_port: int, api_port: int) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={api_port}",
        f"--tls-cert-file={state / 'apiserver.crt'}",
        f"--tls-private-key-file={state / 'apiserver.key'}",
        f"--token-auth-file={state / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={state / 'apiserver.key'}",
        f"--service-account-signing-key-file={state / 'apiserver.key'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--endpoint-reconciler-type=none",
    ]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()

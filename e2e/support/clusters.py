"""The cluster under test: the current context of a user, or the one-node cluster that `e2e/cluster` starts.

Only the second kind can lose its API server or be asked for its audit log and processes; cases that need that take the
fixture `one_node` and are skipped elsewhere, loudly.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.kubectl import Kubectl
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, str(ROOT / "e2e" / "cluster")]
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Cluster:
    """How to reach a cluster, whoever runs it."""

    kubectl: Kubectl
    helm: str

    @property
    def node(self) -> OneNode | None:
        """Power over the cluster's parts, where the tests have it."""
        return None


@dataclass(frozen=True)
class OneNode(Cluster):
    """The cluster of `e2e/cluster` on this machine: its parts can be stopped, its processes and audit log seen."""

    state: Path

    @property
    def node(self) -> OneNode:
        return self

    @property
    def audit_log(self) -> Path:
        return self.state / "log" / "audit.log"

    def stop(self, part: str) -> None:
        """Kill a part at once: `etcd`, `kube-apiserver`, `kubelet`, ..."""
        self.command("stop", part)

    def start(self, part: str) -> None:
        self.command("start", part)

    def command(self, *arguments: str) -> str:
        argv = [*PROGRAM, *arguments, "--state", str(self.state)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=START_TIMEOUT_S)
        assert done.returncode == 0, f"e2e/cluster {' '.join(arguments)}: {done.stderr}{done.stdout[-2000:]}"
        return done.stdout

    def answers(self) -> bool:
        return self.kubectl.run("get", "--raw", "/readyz", "--request-timeout=2s").returncode == 0

    @contextmanager
    def without(self, part: str) -> Iterator[None]:
        """The cluster without one of its parts; it is back, and the API server ready, when the block ends."""
        self.stop(part)
        try:
            yield
        finally:
            self.start(part)
            until(f"the API server answers after the return of {part}", self.answers, timeout_s=60)


def foreign(context: str, kubeconfig: str) -> Cluster:
    """The cluster of a context that somebody else runs (kind, a test cluster)."""
    kubectl = Kubectl(_program("kubectl"), kubeconfig or _default_kubeconfig(), context)
    return Cluster(kubectl, _program("helm"))


def running(kubeconfig: Path, programs: str = "") -> OneNode:
    """A one-node cluster that runs already; its state lies beside its kubeconfig."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}" if programs else os.environ["PATH"]
    kubectl = Kubectl(_program("kubectl", path), str(kubeconfig))
    return OneNode(kubectl, _program("helm", path), kubeconfig.resolve().parent)


@contextmanager
def started(state: Path) -> Iterator[OneNode]:
    """A one-node cluster of our own, gone when the block ends."""
    done = subprocess.run(
        [*PROGRAM, "up", "--state", str(state)], capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stderr} (`make e2e` builds what is missing)"
    exports = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    try:
        yield running(Path(exports["KUBECONFIG"]), exports["PATH"].split(os.pathsep)[0])
    finally:
        subprocess.run([*PROGRAM, "down", "--state", str(state)], check=True, timeout=START_TIMEOUT_S)


def _program(name: str, path: str | None = None) -> str:
    found = shutil.which(name, path=path)
    assert found is not None, f"{name} is not on PATH; the end-to-end tests need it"
    return found


def _default_kubeconfig() -> str:
    return os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))

"""Access to the cluster under test: a context of the user, or the one-node cluster that `e2e/cluster` starts.

Only the second kind can lose its API server and has an audit log and local processes; cases that need these use the
fixture `one_node` and are skipped elsewhere with a reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kubectl import Kubectl
from support.waiting import until

DEFINITION = "crd/llmdeployments.pagemill.dev"
RELEASE_NAME = "pagemill"
RELEASE_NAMESPACE = "pagemill-system"
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, str(ROOT / "e2e" / "cluster")]
PROGRAM_TIMEOUT_S = 2400.0
LEADERS = ("kube-controller-manager", "kube-scheduler")
"""Components of which one replica works, the holder of a Lease."""


@dataclass(frozen=True)
class Cluster:
    """Access to a cluster of either kind."""

    kubectl: Kubectl
    helm: str

    @property
    def node(self) -> OneNode | None:
        """Return the control of the cluster's components, or None if the tests have none."""
        return None


@dataclass(frozen=True)
class OneNode(Cluster):
    """The one-node cluster on this machine: tests can stop its components and read its processes and audit log."""

    state: Path

    @property
    def node(self) -> OneNode:
        return self

    @property
    def audit_log(self) -> Path:
        return self.state / "audit.log"

    def stop(self, part: str) -> None:
        """Kill a component at once: `etcd`, `kube-apiserver`, `kubelet`, ..."""
        program("stop", part)

    def start(self, part: str) -> None:
        program("start", part)

    def answers(self) -> bool:
        return self.kubectl.run("get", "--raw", "/readyz", "--request-timeout=2s").returncode == 0

    @contextmanager
    def without(self, part: str) -> Iterator[None]:
        """Run the block without one of the components, then start it and wait until the API server is ready."""
        self.stop(part)
        try:
            yield
        finally:
            self.start(part)
            self._resume_control(f"the return of {part}")

    @contextmanager
    def silent(self, part: str) -> Iterator[None]:
        """Suspend a component while the block runs: it answers nothing, and its connections stay open."""
        pid: int = json.loads((self.state / "pids.json").read_text())[part]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)
            self._resume_control(f"{part} resumes")

    def _resume_control(self, event: str) -> None:
        """Wait for the API server, and restart what elsewhere exits because it could not renew its Lease.

        With what it had cached before, the controller manager would report the node and the gateways as not ready for
        more than a minute.
        """
        until(f"the API server answers after {event}", self.answers, timeout_s=60)
        for part in LEADERS:
            self.stop(part)
            self.start(part)


@contextmanager
def foreign(context: str, kubeconfig: str, folder: Path) -> Iterator[Cluster]:
    """Use the cluster of a context that is managed elsewhere; refuse one with Pagemill installed.

    Cases get a kubeconfig in `folder` with only this context, so that no command can reach another cluster.
    """
    theirs = Kubectl(_program("kubectl"), kubeconfig or _default_kubeconfig(), context)
    own = folder / "kubeconfig"
    own.touch(mode=0o600)
    own.write_text(theirs.ok("config", "view", "--raw", "--minify", "--flatten"))
    cluster = Cluster(Kubectl(theirs.binary, str(own), context), _program("helm"))
    refuse_installed(cluster.kubectl)
    yield cluster


def refuse_installed(kubectl: Kubectl) -> None:
    """Exit if the cluster has the CRD or a release, because cases delete the CRD, and with it every LLMDeployment."""
    looks = (
        (DEFINITION,),
        (f"namespace/{RELEASE_NAMESPACE}",),
        ("secrets", "--all-namespaces", "--selector", f"owner=helm,name={RELEASE_NAME}"),
    )
    found = [name for look in looks for name in kubectl.ok("get", *look, "--ignore-not-found", "-o", "name").split()]
    if not found:
        return
    pytest.exit(
        f"context {kubectl.context}: {', '.join(found)} exist, and the end-to-end cases would destroy them. Use "
        "another cluster; delete them only when they are left from an earlier run of these tests.",
        returncode=pytest.ExitCode.USAGE_ERROR,
    )


def running(kubeconfig: Path, programs: str = "") -> OneNode:
    """Return the one-node cluster that already runs; its state is in the folder of its kubeconfig."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}" if programs else os.environ["PATH"]
    kubectl = Kubectl(_program("kubectl", path), str(kubeconfig))
    return OneNode(kubectl, _program("helm", path), kubeconfig.resolve().parent)


@contextmanager
def started() -> Iterator[OneNode]:
    """Run a one-node cluster while the block runs; a machine can have only one."""
    exports = _exports(program("up"))
    try:
        yield running(Path(exports["KUBECONFIG"]), exports["PATH"].split(os.pathsep)[0])
    finally:
        program("down")


@contextmanager
def api_server(state: Path) -> Iterator[Kubectl]:
    """Run only an API server and its etcd while the block runs, without a node and as any user."""
    exports = _exports(program("up", "--api-only", str(state)))
    try:
        yield Kubectl(_program("kubectl", exports["PATH"].split(os.pathsep)[0]), exports["KUBECONFIG"])
    finally:
        program("down", "--api-only", str(state))


def build_images() -> str:
    """Build the images of this checkout and load them into the one-node cluster; return their tag."""
    return _exports(program("images"))["PAGEMILL_TAG"]


def program(*arguments: str) -> str:
    """Run `e2e/cluster`; return its output."""
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    assert done.returncode == 0, f"e2e/cluster {' '.join(arguments)}: {done.stderr}{done.stdout[-2000:]}"
    return done.stdout


def _exports(printed: str) -> dict[str, str]:
    """Return the variables of the last line, `export NAME=value NAME=value`."""
    return dict(word.split("=", 1) for word in printed.splitlines()[-1].split()[1:])


def _program(name: str, path: str | None = None) -> str:
    found = shutil.which(name, path=path)
    assert found is not None, f"{name} is not on PATH; the end-to-end tests need it"
    return found


def _default_kubeconfig() -> str:
    return os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))

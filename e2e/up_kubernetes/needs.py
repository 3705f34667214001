"""Finds what `make up-kubernetes` lacks, before it starts anything: programs, rights, devices. It changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import binaries
import host
import images
import processes
from layout import KEPT, RUN
from targets import Target

DESCRIPTION = "make up-kubernetes"
"""What marks a Helm release as made by this command."""
RELEASE = "pagemill"
NAMESPACE = "pagemill-system"
WHERE = {
    "kind": "https://kind.sigs.k8s.io",
    "k3d": "https://k3d.io",
    "minikube": "https://minikube.sigs.k8s.io",
}
DAEMON_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0


def builder() -> str | None:
    """Return `docker` if its daemon answers, otherwise `buildah` if it is installed."""
    if _answers(["docker", "version", "--format", "{{.Server.Version}}"]):
        return "docker"
    return "buildah" if shutil.which("buildah") else None


def missing(target: Target, tag: str, components: Sequence[str], gpus: int) -> list[str]:
    """Return what is missing, each with its remedy; `gpus` is the largest number that a replica asks for."""
    found = _of_one_node(tag, components) if target.is_one_node else _of_context(target)
    return [*found, *not_ours(target), *_devices(target, gpus)]


def _of_one_node(tag: str, components: Sequence[str]) -> Iterator[str]:
    try:
        host.check()
    except host.HostError as error:
        yield str(error)
    absent = [name for name in ("buildah", "skopeo") if shutil.which(name) is None]
    if "buildah" not in absent and not all(images.exists(images.reference(each, tag)) for each in components):
        absent += [] if images.exists(images.BASE) or shutil.which("mmdebstrap") else ["mmdebstrap"]
    if absent:
        yield f"{', '.join(absent)} not on PATH: on Debian, apt-get install {' '.join(absent)}"
    if binaries.missing(binaries.USUAL):
        try:
            binaries.check_go()
        except binaries.BuildError as error:
            yield str(error)


def busy(target: Target) -> str | None:
    """Return why the one-node cluster cannot be used: it runs, and neither we nor the user's context started it."""
    if not target.is_one_node or target.is_current or KEPT.exists() or not processes.started(RUN):
        return None
    return (
        "The one-node cluster runs for something else, such as `make e2e`: wait until that ends, or end it with "
        "`python3 e2e/cluster down`, or export its KUBECONFIG to use it."
    )


def _of_context(target: Target) -> Iterator[str]:
    if shutil.which(target.kind) is None:
        where = WHERE[target.kind]
        yield f"`{target.kind}` is not on PATH; it loads the images into the nodes of {target.context}: {where}"
    if shutil.which("helm") is None:
        yield "`helm` is not on PATH; it installs the chart: https://helm.sh/docs/intro/install"
    if builder() is None:
        there = "`docker` is there, and its daemon does not answer: start it" if shutil.which("docker") else "no Docker"
        yield f"nothing can build images ({there}); install Docker, or on Debian: apt-get install buildah"
    answer = _kubectl(target, "auth", "can-i", "*", "*", "--all-namespaces")
    if answer is None or (answer.returncode != 0 and answer.stdout.strip() != "no"):
        reason = "no answer" if answer is None else answer.stderr.strip()[-300:]
        yield f"the cluster of context {target.context} does not answer: {reason}"
    elif answer.stdout.strip() == "no":
        yield f"context {target.context} may not do everything, which installing needs: use an administrator's"


def not_ours(target: Target) -> list[str]:
    """Return why a release of another command must stay, if the cluster has one."""
    if not _is_foreign_release(target):
        return []
    return [
        f"the current context's cluster has a release `{RELEASE}` in {NAMESPACE} that another command installed: "
        f"`helm uninstall {RELEASE} --namespace {NAMESPACE}`, or upgrade it with helm yourself"
    ]


def _is_foreign_release(target: Target) -> bool:
    """Whether the cluster of the current context has one; in a one-node cluster of ours nothing else is installed."""
    helm = shutil.which("helm") or str(binaries.bin_dir() / "helm")
    if not (target.context or target.is_current) or not Path(helm).exists():
        return False
    context = ["--kube-context", target.context] if target.context else []
    argv = [helm, *context, "--namespace", NAMESPACE, "status", RELEASE, "-o", "json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S)
        return done.returncode == 0 and json.loads(done.stdout)["info"]["description"] != DESCRIPTION
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return True


def _devices(target: Target, gpus: int) -> Iterator[str]:
    if not gpus:
        return
    offered = 0
    if not target.is_one_node or target.is_current:
        done = _kubectl(target, "get", "nodes", "-o", "json")
        nodes: list[dict[str, Any]] = json.loads(done.stdout)["items"] if done and done.returncode == 0 else []
        offered = max((int(each["status"]["allocatable"].get("nvidia.com/gpu", 0)) for each in nodes), default=0)
    if offered < gpus:
        yield (
            f"spec.resources.gpus is {gpus}, and the largest node offers {offered}: name a FILE with "
            "`resources.gpus: 0`, or use a cluster with GPUs"
        )


def _kubectl(target: Target, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    context = ["--context", target.context] if target.context else []
    argv = ["kubectl", *context, "--request-timeout=20s", *arguments]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _answers(argv: list[str]) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, timeout=DAEMON_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False

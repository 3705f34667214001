"""bash runs every command of docs/how-to/install-with-helm.md and of the README's Kubernetes section.

`REGISTRY` and `TAG` name the images on the nodes; `docker` is a script that records its arguments.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import Cluster
from support.release import SHARED_NAMESPACE, Releases
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "install-with-helm.md"
COMPONENTS = ("engine", "engine-cpu", "gateway", "operator")
STEP_TIMEOUT_S = 600.0
NAMES = "export REGISTRY="
DEFINITIONS = "crd/llmdeployments.pagemill.dev crd/loraadapters.pagemill.dev"
"""Start of the line in which the page chooses names; the test replaces them with the node's."""

pytestmark = pytest.mark.timeout(STEP_TIMEOUT_S + 300)


@pytest.fixture
def empty(releases: Releases, cluster: Cluster) -> Iterator[Cluster]:
    """Remove the shared release; afterwards remove what the page's commands leave if one of them fails."""
    with releases.absent():
        cluster.kubectl.delete(DEFINITIONS, "--ignore-not-found")
        try:
            yield cluster
        finally:
            subprocess.run([cluster.helm, *_where(cluster), "uninstall", "pagemill", "--ignore-not-found"], timeout=120)
            cluster.kubectl.run("delete", "llmd", "--all", "--all-namespaces", "--timeout=60s", timeout_s=90)
            cluster.kubectl.delete(f"namespace/{SHARED_NAMESPACE}", "--ignore-not-found")
            cluster.kubectl.delete(DEFINITIONS, "--ignore-not-found")


def _where(cluster: Cluster) -> list[str]:
    context = ["--kube-context", cluster.kubectl.context] if cluster.kubectl.context else []
    return ["--kubeconfig", cluster.kubectl.kubeconfig, *context, "--namespace", SHARED_NAMESPACE]


def test_the_page_leads_from_an_empty_cluster_to_an_answer_and_back(
    empty: Cluster, image_tag: str, tmp_path: Path
) -> None:
    steps = _steps(PAGE.read_text())
    assert len(steps) >= 8
    text = _typed(steps, empty, image_tag, tmp_path)
    assert "ok: the gateway lists 0 models" in text
    assert '"completion_tokens":' in text
    left = "customresourcedefinitions,namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies"
    until(
        "nothing is left",
        lambda: "pagemill" not in empty.kubectl.ok("get", left, "-o", "name"),
        timeout_s=60,
    )


def test_the_readme_alone_leads_to_an_answer(empty: Cluster, image_tag: str, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().split("\n## On Kubernetes\n")[1].split("\n## ")[0]
    assert '"completion_tokens":' in _typed(_steps(section), empty, image_tag, tmp_path)


def _steps(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _typed(steps: list[str], cluster: Cluster, image_tag: str, folder: Path) -> str:
    """Run all steps except the choice of names; return their output. Fail unless the pushed images are the node's."""
    reported = [_reported(step) for step in steps if not step.startswith(NAMES)]
    assert len(reported) == len(steps) - 1
    log = folder / "steps.log"
    with log.open("w") as output:
        done = subprocess.run(
            [
                "bash",
                "-c",
                "\n".join(["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *reported]),
            ],
            cwd=ROOT,
            env=_environment(cluster, folder) | {"REGISTRY": "docker.io", "TAG": image_tag},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=STEP_TIMEOUT_S,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-4000:]
    asked = [shlex.split(line) for line in (folder / "docker.log").read_text().splitlines()]
    names = {each: f"docker.io/pagemill/{each}:{image_tag}" for each in COMPONENTS}
    assert [words for words in asked if words[0] == "build"] == [
        ["build", "--target", each, "-t", name, "."] for each, name in names.items()
    ]
    assert [words[1] for words in asked if words[0] == "push"] == [*names.values()]
    return text


def _reported(step: str) -> str:
    """Return the step preceded by an `echo` of it, so that the log of a failure names the step."""
    first = step.splitlines()[0].replace("'", "")
    return f"echo '== {first}'\n{step}"


def _environment(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Return the reader's environment: helm requests few resources, docker builds nothing."""
    helm, kubectl = Path(cluster.helm), Path(cluster.kubectl.binary)
    values = folder / "node-values.yaml"
    small = "resources: {requests: {cpu: 20m, memory: 64Mi}, limits: {memory: 1Gi}}"
    values.write_text(f"operator: {{{small}}}\ngateway: {{{small}}}\n")
    _script(
        folder / "helm", f'case $1 in install|upgrade) exec {helm} "$@" --values {values};; *) exec {helm} "$@";; esac'
    )
    _script(folder / "docker", f'echo "$@" >> {folder / "docker.log"}')
    path = f"{folder}{os.pathsep}{kubectl.parent}{os.pathsep}{os.environ['PATH']}"
    context = {"HELM_KUBECONTEXT": cluster.kubectl.context} if cluster.kubectl.context else {}
    return {**os.environ, "PATH": path, "KUBECONFIG": cluster.kubectl.kubeconfig, **context}


def _script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)

"""Every command of docs/how-to/install-with-helm.md, in its order, by bash, as a reader types it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import Cluster
from support.release import SHARED_NAMESPACE, Releases
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "install-with-helm.md"
STEP_TIMEOUT_S = 600.0


@pytest.fixture
def empty(releases: Releases, cluster: Cluster) -> Iterator[Cluster]:
    """Without the shared release, and afterwards without what the page leaves when one of its steps fails."""
    with releases.absent():
        cluster.kubectl.delete("crd/llmdeployments.pagemill.dev", "--ignore-not-found")
        try:
            yield cluster
        finally:
            subprocess.run([cluster.helm, *_where(cluster), "uninstall", "pagemill", "--ignore-not-found"], timeout=120)
            cluster.kubectl.run("delete", "llmd", "--all", "--all-namespaces", "--timeout=60s", timeout_s=90)
            cluster.kubectl.delete(f"namespace/{SHARED_NAMESPACE}", "--ignore-not-found")
            cluster.kubectl.delete("crd/llmdeployments.pagemill.dev", "--ignore-not-found")


def _where(cluster: Cluster) -> list[str]:
    context = ["--kube-context", cluster.kubectl.context] if cluster.kubectl.context else []
    return ["--kubeconfig", cluster.kubectl.kubeconfig, *context, "--namespace", SHARED_NAMESPACE]


def test_a_reader_gets_from_nothing_to_an_answer_and_back(empty: Cluster, image_tag: str, tmp_path: Path) -> None:
    steps = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(steps) >= 7
    script = "\n".join(["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *map(_told, steps)])
    log = tmp_path / "steps.log"
    with log.open("w") as output:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env=_environment(empty, image_tag, tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=STEP_TIMEOUT_S,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-4000:]
    assert "ok: the gateway lists 0 models" in text
    assert '"completion_tokens":' in text
    left = "customresourcedefinitions,namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies"
    until(
        "nothing is left",
        lambda: "pagemill" not in empty.kubectl.ok("get", left, "-o", "name"),
        timeout_s=60,
    )


def _told(step: str) -> str:
    """The step, announced in the log, so that a failure names it."""
    first = step.splitlines()[0].replace("'", "")
    return f"echo '== {first}'\n{step}"


def _environment(cluster: Cluster, image_tag: str, folder: Path) -> dict[str, str]:
    """The reader's PATH; helm installs the images that the node holds, with requests that fit it."""
    helm, kubectl = Path(cluster.helm), Path(cluster.kubectl.binary)
    values = folder / "node-values.yaml"
    images = "".join(f"  {name}: {{tag: '{image_tag}'}}\n" for name in ("operator", "gateway", "engine"))
    small = "resources: {requests: {cpu: 20m, memory: 64Mi}, limits: {memory: 1Gi}}"
    values.write_text(f"image:\n{images}operator: {{{small}}}\ngateway: {{{small}}}\n")
    wrapper = folder / "helm"
    wrapper.write_text(
        f'#!/bin/sh\ncase $1 in install|upgrade) exec {helm} "$@" --values {values};; *) exec {helm} "$@";; esac\n'
    )
    wrapper.chmod(0o755)
    path = f"{folder}{os.pathsep}{kubectl.parent}{os.pathsep}{os.environ['PATH']}"
    context = {"HELM_KUBECONTEXT": cluster.kubectl.context} if cluster.kubectl.context else {}
    return {**os.environ, "PATH": path, "KUBECONFIG": cluster.kubectl.kubeconfig, **context}

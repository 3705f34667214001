"""`make up-kubernetes` on a cluster without Pagemill: an answer, a second call that changes nothing, and removal.

The cluster is the one-node cluster of the tests, as one that the user has started: the command uses it and leaves it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import OneNode
from support.deployments import Deployed
from support.release import SHARED_NAMESPACE, Releases

PROGRAM = Path(__file__).resolve().parent
ROOT = PROGRAM.parents[1]
FILE = ROOT / "examples" / "llmdeployment.yaml"
COMMAND_TIMEOUT_S = 600.0
LEFT = "customresourcedefinitions,namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies"

pytestmark = pytest.mark.timeout(3 * COMMAND_TIMEOUT_S)


@pytest.fixture
def empty(releases: Releases, one_node: OneNode, image_tag: str) -> Iterator[OneNode]:
    """Remove the shared release, and afterwards what the command leaves if it fails."""
    with releases.absent():
        for kind in ("llmdeployments", "loraadapters"):
            one_node.kubectl.delete(f"crd/{kind}.pagemill.dev", "--ignore-not-found")
        try:
            yield one_node
        finally:
            command(one_node, "--down")


def command(cluster: OneNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(cluster.kubectl.binary).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "KUBECONFIG": cluster.kubectl.kubeconfig},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


def test_one_command_leads_to_an_answer_and_another_to_nothing(empty: OneNode) -> None:
    first = command(empty, str(FILE))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Paris" in first.stdout
    assert re.search(r"^URL +http://\S+/v1$", first.stdout, re.MULTILINE)

    smollm2 = Deployed(empty.kubectl.within("default"), "smollm2")
    before = {pod["metadata"]["uid"] for pod in smollm2.pods()}
    again = command(empty, str(FILE))
    assert again.returncode == 0, again.stdout + again.stderr
    assert not re.search(r"^ +(?:build|load) (?:gateway|operator|engine)", again.stdout, re.MULTILINE), (
        "no image has changed"
    )
    assert {pod["metadata"]["uid"] for pod in smollm2.pods()} == before, "the engines run on"

    removed = command(empty, "--down")
    assert removed.returncode == 0, removed.stderr
    assert SHARED_NAMESPACE not in empty.kubectl.ok("get", "namespaces", "-o", "name")
    assert "pagemill" not in empty.kubectl.ok("get", LEFT, "-o", "name")
    assert empty.answers(), "who started the cluster ends it"

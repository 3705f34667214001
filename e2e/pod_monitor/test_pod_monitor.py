"""Each deployment has a PodMonitor if the Prometheus operator is installed; without it, everything else works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import Document, llmdeployment
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases

NAME = "podmonitors.monitoring.coreos.com"
LOOSE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
DEFINITION: Document = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": NAME},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
        "scope": "Namespaced",
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": LOOSE}}],
    },
}


@pytest.fixture
def monitored(releases: Releases) -> Iterator[Release]:
    """Install a release whose operator finds the PodMonitor kind when it starts."""
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        cluster = release.cluster.kubectl
        if cluster.run("get", f"crd/{NAME}").returncode == 0:
            pytest.skip("this cluster has the real kind")
        cluster.apply(DEFINITION)
        try:
            cluster.wait(f"crd/{NAME}", "condition=Established", 30)
            release.install()
            yield release
        finally:
            release.remove()
            cluster.delete(f"crd/{NAME}")


def test_a_deployment_has_a_pod_monitor_until_it_is_deleted(monitored: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=0))
    space.wait("podmonitor/chat-engine", "create", 60)
    spec = space.json("get", "podmonitor/chat-engine")["spec"]
    assert spec["selector"]["matchLabels"] == dict(each.split("=") for each in chat.pod_selector.split(","))
    chat.delete()
    space.wait("podmonitor/chat-engine", "delete", 60)

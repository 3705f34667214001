"""Upgrade from the previous commit's platform and rollback under load; Helm 4 continues a release of Helm 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from support.clusters import Cluster
from support.deployments import deploy
from support.history import Previous
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.programs import find
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

from pagemill_crds import API_VERSION, SERVED_VERSIONS, STORED_API_VERSION

ROLLING = {"gateway": {"drainTimeoutSeconds": 45}, "operator": {"resyncSeconds": 700}}
"""Settings that replace every pod of the release, whatever the difference between the charts."""


@pytest.fixture
def own(releases: Releases) -> Iterator[Release]:
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        yield release
        release.remove()


def _uids(release: Release) -> set[str]:
    pods: list[dict[str, Any]] = [*release.pods("operator"), *release.pods("gateway")]
    return {pod["metadata"]["uid"] for pod in pods}


def _replaced(release: Release, before: set[str]) -> set[str]:
    """Wait until all pods in `before` are replaced, for which Helm does not wait; return the new pods."""
    until("every pod of the release is replaced", lambda: _uids(release).isdisjoint(before), timeout_s=60)
    return _uids(release)


def _install(release: Release, previous: Previous) -> None:
    """Install the earlier platform; without image loading, install the current programs with its chart."""
    older = {"tag": previous.image_tag} if release.cluster.node is not None else {}
    release.install(chart=previous.chart, values={"image": {"operator": older, "gateway": older}})


def test_upgrade_and_rollback_interrupt_no_stream(
    unbroken_path: None, own: Release, space: Kubectl, previous: Previous
) -> None:
    _install(own, previous)
    # The earlier release may serve only one version; objects applied in it must stay valid in the next release.
    chat = deploy(space, {**llmdeployment("chat", replicas=2), "apiVersion": STORED_API_VERSION})
    chat.wait_ready(2)
    engines = {pod["metadata"]["uid"] for pod in chat.pods()}
    before = _uids(own)
    with running_load(own.service("chat")) as load:
        own.install(values=ROLLING)
        load.wait_for(10)
        upgraded = _replaced(own, before)
        space.apply(llmdeployment("chat", replicas=2))  # the newest version is the only change
        _forget_versions(space)
        assert chat.get()["apiVersion"] == API_VERSION
        own.helm("rollback", own.name, "1", "--wait")
        _forget_versions(space)
        load.wait_for(10)
        _replaced(own, upgraded)
    load.report().assert_all_complete(at_least=30)
    assert {pod["metadata"]["uid"] for pod in chat.pods()} == engines, "an upgrade of the platform restarted an engine"
    chat.wait_ready(2)


def _forget_versions(kubectl: Kubectl) -> None:
    """Make kubectl refresh the versions that the cluster serves, which it caches for hours."""
    newest = kubectl.json("get", "crd/llmdeployments.pagemill.dev")["spec"]["versions"][0]["name"]
    asked = ("api-resources", "--api-group=pagemill.dev")
    until("kubectl knows the newest version", lambda: newest in kubectl.ok(*asked), timeout_s=30)


def test_the_definition_is_upgraded_with_the_release(own: Release, previous: Previous) -> None:
    _install(own, previous)
    own.install()
    definition = own.cluster.kubectl.json("get", "crd/llmdeployments.pagemill.dev")
    assert definition["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    rendered = own.helm("get", "manifest", own.name)
    assert [each["name"] for each in definition["spec"]["versions"] if each["served"]] == list(SERVED_VERSIONS)
    for description in _descriptions(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]):
        assert " ".join(description.split()) in " ".join(rendered.replace("''", "'").split())


def _descriptions(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the descriptions of the first level of the schema, where most changes are visible."""
    yield schema["description"]
    for each in schema["properties"]["spec"]["properties"].values():
        yield each["description"]


def test_helm_4_upgrades_a_release_of_helm_3(
    unbroken_path: None, own: Release, cluster: Cluster, space: Kubectl
) -> None:
    three = dataclasses.replace(own, cluster=dataclasses.replace(cluster, helm=find("helm3")))
    three.install()
    three.helm("test", three.name)
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    before = _uids(own)
    with running_load(own.service("chat")) as load:
        own.install(values=ROLLING)
        load.wait_for(5)
        upgraded = _replaced(own, before)
        own.helm("rollback", own.name, "--wait")
        load.wait_for(5)
        _replaced(own, upgraded)
    load.report().assert_all_complete(at_least=10)
    own.helm("test", own.name)
    three.helm("uninstall", three.name, "--wait")

"""A release that serves two namespaces is installed by a user without rights outside those namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.clusters import ROOT
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

OWNER = "namespace-owner"
NOTICE_S = 20.0
"""Seconds in which an operator that watches too much would act."""


@pytest.fixture
def elsewhere(make_space: Callable[..., Kubectl]) -> Kubectl:
    return make_space()


@pytest.fixture
def namespaced(releases: Releases, space: Kubectl, elsewhere: Kubectl) -> Iterator[Release]:
    """Install with the rights of an account that is administrator of the release's namespace and `space` only."""
    releases.fresh()  # This leaves the CRD behind, as an administrator would.
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        _own(release, space)
        user = f"system:serviceaccount:{release.namespace}:{OWNER}"
        values = {"watchNamespaces": [space.namespace], "crds": {"install": False}}
        try:
            release.install(values=values, arguments=("--kube-as-user", user))
            yield release
        finally:
            release.remove()


def _own(release: Release, space: Kubectl) -> None:
    """Make one account the administrator of two namespaces, as the documentation says."""
    kubectl = release.cluster.kubectl
    kubectl.ok("apply", "--server-side", "-f", str(ROOT / "crds" / "namespace-admins.yaml"))
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": OWNER}}
    api = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": OWNER},
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "admin"},
        "subjects": [{"kind": "ServiceAccount", "name": OWNER, "namespace": release.namespace}],
    }
    release.prepare()
    kubectl.within(release.namespace).apply(account)
    for namespace in (release.namespace, space.namespace):
        kubectl.within(namespace).apply(binding)
    user = f"system:serviceaccount:{release.namespace}:{OWNER}"
    may = ("auth", "can-i", "patch", "llmdeployments.pagemill.dev/status", "--as", user)
    until("the role admin is extended", lambda: kubectl.within(space.namespace).run(*may).stdout.strip() == "yes")


def test_the_release_serves_its_namespaces_and_does_not_change_others(
    namespaced: Release, space: Kubectl, elsewhere: Kubectl
) -> None:
    stranger = deploy(elsewhere, llmdeployment("stranger"))
    served = deploy(space, llmdeployment("served"))
    served.wait_ready(1)
    service = namespaced.service("served")
    assert "Paris" in service.ask("What is the capital of France?")
    assert service.models() == ["served"]
    namespaced.helm("test", namespaced.name)
    assert stranger.status() == {}, "the operator changed an object in a namespace that it does not serve"
    assert elsewhere.items("deployments") == []
    _holds_no_cluster_right(namespaced)
    _rolls(served)


def _holds_no_cluster_right(release: Release) -> None:
    selector = f"app.kubernetes.io/instance={release.name}"
    kubectl = release.cluster.kubectl
    for kind in ("clusterroles", "clusterrolebindings", "validatingadmissionpolicies"):
        assert kubectl.items(kind, "--selector", selector) == []
    for component in ("operator", "gateway"):
        user = f"system:serviceaccount:{release.namespace}:{release.name}-{component}"
        asked = kubectl.run("auth", "can-i", "list", "llmdeployments.pagemill.dev", "--all-namespaces", "--as", user)
        assert asked.stdout.strip() == "no"


def _rolls(served: Deployed) -> None:
    """Check that changes and deletions need no further rights."""
    old = served.pods()
    served.patch(engine={"maxNumSeqs": 6})
    served.wait_rolled_out(old)
    served.delete()

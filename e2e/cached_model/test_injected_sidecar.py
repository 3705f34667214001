"""What others do to cached deployments: containers added to the loader, an object deleted without its children."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import hubs
from support.deployments import deploy
from support.kubectl import Kubectl
from support.release import Release
from support.waiting import until

NAME = "e2e-injected-sidecar"
API = "admissionregistration.k8s.io/v1"


@pytest.fixture
def injected(release: Release, space: Kubectl) -> Iterator[Kubectl]:
    """Let a policy add a container that never ends to the loaders of the namespace."""
    image = f"docker.io/pagemill/engine-cpu:{release.image_tag}"
    security = (
        "Object.spec.containers.securityContext{allowPrivilegeEscalation: false, "
        'capabilities: Object.spec.containers.securityContext.capabilities{drop: ["ALL"]}}'
    )
    sidecar = (
        f'Object.spec.containers{{name: "proxy", image: "{image}", securityContext: {security}, '
        'command: ["python", "-c", "import signal; signal.pause()"]}'
    )
    patch = f'[JSONPatch{{op: "add", path: "/spec/containers/-", value: {sidecar}}}]'
    selectors = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.namespace}},
        "objectSelector": {"matchLabels": {"app.kubernetes.io/component": "loader"}},
    }
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "apiVersion": API,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "matchConstraints": {**selectors, "matchPolicy": "Equivalent", "resourceRules": [rule]},
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
        },
    }
    binding = {
        "apiVersion": API,
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": NAME},
        "spec": {"policyName": NAME},
    }
    kubectl = release.cluster.kubectl
    kubectl.apply(policy, binding)
    try:
        probe = {"apiVersion": "v1", "kind": "Pod"}
        probe["metadata"] = {"name": "probe", "labels": selectors["objectSelector"]["matchLabels"]}
        secure = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        probe["spec"] = {
            "securityContext": secure,
            "containers": [{"name": "loader", "image": "x", "securityContext": own}],
        }
        ask = ("create", "--dry-run=server", "-o", "yaml", "-f", "-")
        until("the policy acts", lambda: "name: proxy" in space.run(*ask, stdin=probe).stdout, timeout_s=30)
        yield space
    finally:
        for kind in ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy"):
            kubectl.delete(f"{kind}/{NAME}")


def test_engines_start_beside_an_injected_sidecar_which_is_named(release: Release, injected: Kubectl) -> None:
    chat = deploy(injected, hubs.cached("chat", hubs.start(injected, release.image_tag)))
    chat.wait_ready(1)
    assert release.service("chat").ask()
    message = chat.condition("Ready")["message"]
    assert "FinishedButSidecarRuns" in message
    assert "container proxy" in message
    (loader,) = injected.items("pods", "--selector", f"{chat.selector},app.kubernetes.io/component=loader")
    assert loader["status"]["phase"] == "Running"

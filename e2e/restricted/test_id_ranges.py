"""A namespace whose ids of users come from its own range, as OpenShift's `restricted-v2` assigns them.

One policy sets user and group of pods that name none, another refuses those outside of the range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import hubs
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import Document, secret
from support.release import Release
from support.waiting import until

RANGED = {"e2e.pagemill.dev/ids": "ranged"}
FIRST, COUNT = 1_000_700_000, 10_000
NAME = "e2e-id-ranges"
API = "admissionregistration.k8s.io/v1"
PODS = {
    "matchPolicy": "Equivalent",
    "namespaceSelector": {"matchLabels": RANGED},
    "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
}
LEFT_TO_PLATFORM = {"operator": {"settings": {"engine_ids": {}}}}
"""The chart's values for such a platform."""
WRITES = "import os, tempfile; found = os.stat(tempfile.mkstemp()[0]); print(found.st_uid, os.stat('/tmp').st_gid)"


def _policies() -> list[Document]:
    names_none = "!has(object.spec.securityContext) || !has(object.spec.securityContext.runAsUser)"
    given = f"Object.spec.securityContext{{runAsUser: {FIRST}, fsGroup: {FIRST}}}"
    expression = f"Object{{spec: Object.spec{{securityContext: {given}}}}}"
    last = FIRST + COUNT - 1
    pod = "object.spec.securityContext"
    is_ranged = " && ".join(f"{pod}.{name} >= {FIRST} && {pod}.{name} <= {last}" for name in ("runAsUser", "fsGroup"))
    containers = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
    is_plain = f"{containers}.all(each, !has(each.securityContext) || !has(each.securityContext.runAsUser))"
    return [
        {
            "apiVersion": API,
            "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "matchConstraints": PODS,
                "matchConditions": [{"name": "names-no-user", "expression": names_none}],
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}],
            },
        },
        {
            "apiVersion": API,
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME},
        },
        {
            "apiVersion": API,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "matchConstraints": PODS,
                "failurePolicy": "Fail",
                "validations": [
                    {"expression": is_ranged, "message": "runAsUser and fsGroup must be in the namespace's range"},
                    {"expression": is_plain, "message": "containers must not name a user"},
                ],
            },
        },
        {
            "apiVersion": API,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


@pytest.fixture
def with_fixed_ids(release: Release) -> Iterator[Release]:
    """Return the release, which has its usual values again at the end."""
    yield release
    release.install()


@pytest.fixture
def ranged(release: Release, make_space: Callable[..., Kubectl]) -> Iterator[Kubectl]:
    kubectl = release.cluster.kubectl
    policies = _policies()
    space = make_space(RANGED)
    kubectl.apply(*policies)
    try:
        # The API server reads new policies after a moment.
        refuses = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}}
        refuses["spec"] = {"securityContext": {"runAsUser": 1}, "containers": [{"name": "probe", "image": "x"}]}
        until("the policies act", lambda: "namespace's range" in _refusal(space, refuses), timeout_s=30)
        yield space
    finally:
        kubectl.delete(*(f"{each['kind'].lower()}/{NAME}" for each in policies), "--ignore-not-found")


def _refusal(space: Kubectl, document: Document) -> str:
    return space.run("create", "--dry-run=server", "-f", "-", stdin=document).stderr


def test_loader_and_engine_run_with_the_ids_of_the_namespaces_range(
    with_fixed_ids: Release, ranged: Kubectl, space: Kubectl
) -> None:
    release = with_fixed_ids
    document = hubs.cached("chat", hubs.start(space, release.image_tag))
    ranged.apply(secret(hubs.CREDENTIALS, token=hubs.TOKEN))
    chat = deploy(ranged, document)
    refusal = chat.wait_reason("Ready", "PodsNotCreated", 60)
    assert "the loader's pod is refused" in refusal["message"], refusal
    release.install(values=LEFT_TO_PLATFORM)
    chat.wait_ready(1)
    assert release.service("chat").ask()
    pods = ranged.items("pods", "--selector", chat.selector)
    assert {each["spec"]["securityContext"]["runAsUser"] for each in pods} == {FIRST}
    (job,) = ranged.items("jobs", "--selector", chat.selector)
    assert "runAsUser" not in job["spec"]["template"]["spec"]["securityContext"]
    (engine,) = chat.pods()
    ids = ranged.ok("exec", engine["metadata"]["name"], "--", "python", "-c", "import os; print(os.getuid())")
    assert ids.split() == [str(FIRST)]
    # The container's own folders are writable for every user: it answers, and its temporary files are its own.
    written = ranged.ok("exec", engine["metadata"]["name"], "--", "python", "-c", WRITES)
    assert written.split() == [str(FIRST), str(FIRST)]

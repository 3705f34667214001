"""Everything runs in namespaces under the restricted Pod Security Standard without a warning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import yaml
from support import hubs
from support.audit import AuditLog
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import RESTRICTED, Document, llmdeployment
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

AUDIT = "pod-security.kubernetes.io/audit"
STRICT = {**RESTRICTED, AUDIT: "restricted"}
NAMED = {"name": "engine"}
VIOLATION = "pod-security.kubernetes.io/audit-violations"


@pytest.fixture
def strict(releases: Releases) -> Iterator[Release]:
    """Install a release in a namespace that enforces, warns and audits."""
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        release.prepare()
        labels = [f"{key}={value}" for key, value in STRICT.items()]
        release.cluster.kubectl.ok("label", f"namespace/{release.namespace}", *labels)
        try:
            release.install()
            yield release
        finally:
            release.remove()


def test_no_object_of_the_release_and_of_a_deployment_is_warned_about(strict: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    assert "Paris" in strict.service("chat").ask("What is the capital of France?")
    strict.helm("test", strict.name)
    labels = strict.cluster.kubectl.json("get", f"namespace/{strict.namespace}")["metadata"]["labels"]
    assert STRICT.items() <= labels.items()
    manifests = [strict.helm("get", "manifest", strict.name), strict.helm("get", "hooks", strict.name)]
    engine = space.json("get", "deployment/chat-engine")
    for kubectl, manifest in (
        (strict.cluster.kubectl.within(strict.namespace), manifests[0]),
        (strict.cluster.kubectl.within(strict.namespace), manifests[1]),
        (space, json.dumps({key: engine[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": NAMED})),
    ):
        done = kubectl.run("create", "--dry-run=server", "--output=name", "-f", "-", stdin=_renamed(manifest))
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr


def _renamed(manifest: str) -> str:
    """Return only the objects that create pods, under new names."""
    made = [
        {**each, "metadata": {**each["metadata"], "name": f"{each['metadata']['name']}-again"}}
        for each in yaml.safe_load_all(manifest)
        if each and each["kind"] in ("Deployment", "Pod", "Job")
    ]
    assert made
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": made})


def test_the_audit_log_contains_no_violation(
    audit: AuditLog, strict: Release, make_space: Callable[..., Kubectl]
) -> None:
    """The log covers the release's installation; a deliberate violation shows that violations are recorded."""
    space = make_space(STRICT)
    chat = deploy(space, hubs.cached("chat", hubs.start(space, strict.image_tag)))
    chat.wait_ready(1)
    assert len(space.items("jobs", "--selector", chat.selector)) == 1, "the loader did not run in that namespace"
    strict.helm("test", strict.name)
    control = make_space({AUDIT: "restricted"})
    image = f"docker.io/pagemill/gateway:{strict.image_tag}"
    control.ok("create", "--dry-run=server", "-f", "-", stdin=_careless_pod(image))
    until("the log has the control's violation", lambda: control.namespace in _violators(audit), timeout_s=30)
    assert _violators(audit) == {control.namespace}


def _careless_pod(image: str) -> Document:
    """Return a pod without a security context, which violates the restricted profile."""
    container = {"name": "careless", "image": image}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "careless"}, "spec": {"containers": [container]}}


def _violators(audit: AuditLog) -> set[str]:
    """Return the namespaces in which an object was created that violates the audited profile."""
    with audit.path.open() as log:
        log.seek(audit.offset)
        # A last line that is still being written has no newline yet.
        noted = [json.loads(line) for line in log if VIOLATION in line and line.endswith("\n")]
    return {event["objectRef"]["namespace"] for event in noted}

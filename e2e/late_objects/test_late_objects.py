"""Objects that come late: how long after each one its deployment is ready, and that none waits for a long pause.

make e2e-measure CASES=e2e/late_objects

All deployments begin at once and fail long enough for retries to be far apart; then each object is created in turn.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import hubs
from support.clusters import ROOT, OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.measures import Measures
from support.objects import Document, llmdeployment, merged, secret
from support.release import CHART, SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1500)]

ABSENT_S = 60.0
"""Seconds for which the objects stay absent after the last deployment has reported its fault."""
GOAL_S = 15.0
"""Longest recovery beyond the start of an engine whose objects are all there."""
REPORTED_S = 180.0
DEFINITIONS = ("llmdeployments.yaml", "loraadapters.yaml")
IMAGE = "docker.io/pagemill/late:1"


@dataclass(frozen=True)
class Late:
    name: str
    reasons: frozenset[str]
    document: Document
    create: Callable[[], object]


def test_a_deployment_is_ready_soon_after_what_it_lacked_exists(
    one_node: OneNode,
    release: Release,
    make_space: Callable[..., Kubectl],
    measures: Measures,
    request: pytest.FixtureRequest,
) -> None:
    space, remote = make_space(), make_space()
    request.addfinalizer(lambda: _images(one_node, "rm", IMAGE))
    start_s = _start_s(space, measures)
    cases = _cases(one_node, release, space, remote)
    deployed = {case.name: deploy(space, case.document) for case in cases}
    for case in cases:
        until(
            f"{case.name} is reported",
            lambda case=case: _reason(deployed[case.name]) in case.reasons,
            timeout_s=REPORTED_S,
        )
    # Retries must get time to be far apart.
    time.sleep(ABSENT_S)
    recovered_s = {case.name: _recovered_s(case, deployed[case.name]) for case in cases}
    for name, seconds in recovered_s.items():
        measures.record(f"late {name}: created to Ready", ready_s=seconds)
    late = {name: seconds for name, seconds in recovered_s.items() if seconds > start_s + GOAL_S}
    assert not late, f"slower than a start of {start_s:.1f} s and {GOAL_S:.0f} s: {late}; all: {recovered_s}"


def test_a_release_works_soon_after_its_definitions_exist(releases: Releases, measures: Measures) -> None:
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        cluster = release.cluster.kubectl
        _delete_definitions(cluster)
        release.prepare()
        values = json.dumps(merged(release.values(), {"crds": {"install": False}}))
        try:
            release.helm("upgrade", "--install", release.name, str(CHART), "--values", "-", stdin=values)
            until("an operator waits", lambda: "waiting for /apis" in _logs(release), timeout_s=REPORTED_S)
            # Retries must get time to be far apart.
            time.sleep(ABSENT_S)
            cluster.ok("apply", "--server-side", *(f"--filename={ROOT / 'crds' / name}" for name in DEFINITIONS))
            created_s = time.monotonic()
            release.wait_ready()
            ready_s = time.monotonic() - created_s
        finally:
            release.remove()
            # Helm installs only definitions that are its own or absent.
            _delete_definitions(cluster)
    measures.record("late definitions: created to a ready operator", ready_s=ready_s)
    assert ready_s < GOAL_S


def _delete_definitions(cluster: Kubectl) -> None:
    for name in ("llmdeployments", "loraadapters"):
        cluster.delete(f"crd/{name}.pagemill.dev", "--ignore-not-found")


def _logs(release: Release) -> str:
    selector = "app.kubernetes.io/component=operator"
    within = release.cluster.kubectl.within(release.namespace)
    return within.run("logs", "--selector", selector, "--tail=50").stdout


def _start_s(space: Kubectl, measures: Measures) -> float:
    """Return the seconds from apply to Ready of a deployment that lacks nothing."""
    began_s = time.monotonic()
    complete = deploy(space, llmdeployment("complete"))
    complete.wait_ready(1)
    start_s = time.monotonic() - began_s
    measures.record("nothing late: apply to Ready", ready_s=start_s)
    complete.delete()
    return start_s


def _cases(node: OneNode, release: Release, space: Kubectl, remote: Kubectl) -> list[Late]:
    named = {"metadata": {"name": "late"}}
    settings = {"apiVersion": "v1", "kind": "ConfigMap", **named, "data": {"k": "v"}}
    volume = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **named, "spec": volume}
    endpoint = f"http://{hubs.server_name(remote)}:{hubs.PORT}"
    on_claim, without_source = hubs.cached("claim", endpoint), hubs.cached("source", endpoint)
    without_token = hubs.cached("token", endpoint)
    on_claim["spec"]["model"]["cache"] = {"claimName": "late"}
    without_token["spec"]["model"]["credentialsSecretRef"] = {"name": "late-token"}
    space.apply(secret(hubs.CREDENTIALS, token=hubs.TOKEN))
    return [
        Late(
            "secret",
            frozenset({"MissingSecret"}),
            llmdeployment("secret", engine={"env": [_variable("secretKeyRef")]}),
            lambda: space.apply(secret("late", k="v")),
        ),
        Late(
            "config-map",
            frozenset({"MissingConfigMap"}),
            llmdeployment("config-map", engine={"env": [_variable("configMapKeyRef")]}),
            lambda: space.apply(settings),
        ),
        Late(
            "image",
            frozenset({"ImagePullFailed"}),
            llmdeployment("image", engine={"image": IMAGE}),
            lambda: _images(node, "tag", f"docker.io/pagemill/engine-cpu:{release.image_tag}", IMAGE),
        ),
        Late(
            "source",
            frozenset({"HubUnreachable", "SourceUnreachable"}),
            without_source,
            lambda: hubs.start(remote, release.image_tag),
        ),
        Late("claim", frozenset({"ClaimNotFound"}), on_claim, lambda: space.apply(claim)),
        Late(
            "token",
            frozenset({"MissingSecret"}),
            without_token,
            lambda: space.apply(secret("late-token", token=hubs.TOKEN)),
        ),
    ]


def _variable(kind: str) -> Document:
    return {"name": "LATE", "valueFrom": {kind: {"name": "late", "key": "k"}}}


def _images(node: OneNode, *arguments: str) -> None:
    """Change the images of the node."""
    ctr = Path(node.kubectl.binary).parent / "ctr"
    argv = [str(ctr), "--address", str(node.state / "containerd.sock"), "--namespace", "k8s.io", "images"]
    subprocess.run([*argv, *arguments], check=True, capture_output=True, timeout=60)


def _recovered_s(case: Late, deployed: Deployed) -> float:
    case.create()
    created_s = time.monotonic()
    deployed.wait_ready(1)
    seconds = time.monotonic() - created_s
    print(f"{case.name}: ready {seconds:.1f} s after it", flush=True)
    # The next case's recovery must not wait for this one's engine.
    deployed.scale(0)
    return seconds


def _reason(deployed: Deployed) -> str:
    reason: str = deployed.condition("Ready").get("reason", "")
    return reason

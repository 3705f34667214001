"""Faults of models that a loader downloads to a volume: claims, Jobs and their pods, with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from observed_world import CACHED, PULL, READY, World, ended, reported, running, unschedulable, waiting

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.model_volume import is_loaded
from pagemill_operator.status.conditions import PROGRESS, events_between

Make = Callable[..., LLMDeployment]


@pytest.fixture
def world(deployment: Make) -> Callable[..., World]:
    return lambda **changes: World(deployment(**changes))


def test_engines_wait_for_the_loader(world: Callable[..., World]) -> None:
    found = world(**CACHED).apply().pod(running(started=True), component="loader").findings()
    assert [found[kind].reason for kind in ("Scheduled", "ModelLoaded", "Ready")] == ["Downloading"] * 3


def test_an_unbound_claim_is_named_with_its_class(world: Callable[..., World]) -> None:
    message = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
    for state in (unschedulable(message), {"node": ""}):
        stuck = world(**CACHED).apply().pod(component="loader", **state)
        stuck.objects["PersistentVolumeClaim", "chat-model"]["status"] = {"phase": "Pending"}
        found = stuck.findings()
        assert (found["Scheduled"].reason, found["Ready"].reason) == ("VolumePending", "VolumePending")
        assert "claim chat-model" in found["Ready"].message
        assert "StorageClass fast" in found["Ready"].message


def test_a_volume_that_is_being_created_is_not_a_fault_at_first(world: Callable[..., World]) -> None:
    message = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
    for state in (unschedulable(message), {"node": ""}):
        young = world(**CACHED).apply().pod(component="loader", **state)
        claim = young.objects["PersistentVolumeClaim", "chat-model"]
        claim["status"] = {"phase": "Pending"}
        claim["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        seen, found = young.at(20.0)
        assert found["Ready"].reason == "Downloading"
        assert seen.requeue_after_s == 10.0, "otherwise no event would report that it takes too long"
        seen, found = young.at(30.0)
        assert (found["Ready"].reason, seen.requeue_after_s) == ("VolumePending", None)
        claim["status"] = {"phase": "Bound"}
        assert young.at(20.0)[0].requeue_after_s is None


def test_for_a_loader_whose_pod_is_refused_the_field_is_named(world: Callable[..., World]) -> None:
    refused = world(**CACHED).apply()
    (job,) = [each for (kind, _), each in refused.objects.items() if kind == "Job"]
    job["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    seen, found = refused.at(5.0)
    assert (found["Ready"].reason, seen.requeue_after_s) == ("Downloading", 10.0)
    found = refused.at(15.0)[1]
    assert (found["Scheduled"].reason, found["Ready"].reason) == ("PodsNotCreated", "PodsNotCreated")
    assert f"kubectl describe job {job['metadata']['name']}" in found["Ready"].message
    job["status"] = {"active": 1}
    assert refused.at(15.0)[1]["Ready"].reason == "Downloading"


def test_a_lost_volume_is_reported(world: Callable[..., World]) -> None:
    lost = world(**CACHED).apply()
    lost.objects["PersistentVolumeClaim", "chat-model"]["status"] = {"phase": "Lost"}
    found = lost.findings()["Ready"]
    assert found.reason == "VolumeLost"
    assert "kubectl delete pvc chat-model" in found.message


@pytest.mark.parametrize(
    ("status", "reason", "remedy"),
    [
        (
            waiting("CrashLoopBackOff", last=reported("CredentialsRefused", "The hub refused the token: correct it.")),
            "CredentialsRefused",
            "correct it",
        ),
        (
            waiting("CreateContainerConfigError", 'secret "hub" not found'),
            "MissingSecret",
            "spec.model.credentialsSecretRef",
        ),
        (waiting("ImagePullBackOff", PULL), "ImagePullFailed", "spec.engine.image"),
    ],
    ids=["credentials", "secret", "image"],
)
def test_a_failed_loader_is_the_reason(
    world: Callable[..., World], status: dict[str, Any], reason: str, remedy: str
) -> None:
    found = world(**CACHED).apply().pod(status, component="loader").findings()
    assert (found["ModelLoaded"].reason, found["Ready"].reason) == (reason, reason)
    assert remedy in found["Ready"].message


UNREACHED = reported("HubUnreachable", "`hf://a/b`: no connection to hub.example.org at port 443")
READY_POD = ({"type": "Ready", "status": "True"},)


@pytest.mark.parametrize(
    ("status", "conditions"),
    [
        (running(started=True, ready=True, last=UNREACHED), READY_POD),
        (running(started=True, last=UNREACHED), ()),
        (waiting("CrashLoopBackOff", last=UNREACHED), ()),
        ({"ready": False, "state": {"terminated": UNREACHED}}, ()),
    ],
    ids=["runs again", "just started again", "waits", "ended"],
)
def test_a_loaders_cause_stays_until_bytes_arrive(
    world: Callable[..., World], status: dict[str, Any], conditions: tuple[dict[str, Any], ...]
) -> None:
    blocked = world(**CACHED).apply().pod(status, component="loader", conditions=conditions)
    found = blocked.findings()["Ready"]
    assert found.reason == "HubUnreachable"
    assert "NetworkPolicy chat-engine" in found.message
    assert "engine_extra_egress" in found.message
    if "running" in status["state"]:
        blocked.progress = "1.0 of 4.0 GiB"
        assert blocked.findings()["ModelLoaded"].reason == "Downloading"


def test_an_engines_own_loader_keeps_its_cause_until_bytes_arrive(world: Callable[..., World]) -> None:
    cached = world(model__source="hf://org/name@v1", model__cache={"hostPath": "/var/models"}).apply()
    cached.pod(waiting("PodInitializing"))
    again = {"name": "loader", **running(started=True, last=UNREACHED)}
    cached.pods[0]["status"]["initContainerStatuses"] = [again]
    found = cached.findings()["Ready"]
    assert (found.reason, "NetworkPolicy chat-engine" in found.message) == ("HubUnreachable", True)
    cached.progress = "1.0 of 4.0 GiB"
    assert cached.findings()["ModelLoaded"].reason == "Downloading"


def test_for_a_job_that_gave_up_the_way_to_restart_it_is_named(world: Callable[..., World]) -> None:
    gone = world(**CACHED).apply()
    (name,) = [name for kind, name in gone.objects if kind == "Job"]
    gone.condition("Job", name, type="Failed", status="True", message="Job has reached the specified backoff limit")
    found = gone.findings()["Ready"]
    assert found.reason == "LoaderFailed"
    assert f"kubectl delete job {name}" in found.message


def done(world: World, *others: dict[str, Any]) -> World:
    """The loader has ended well, and its Job does not know it yet; `others` are containers beside it."""
    world.pod({"ready": False, "state": {"terminated": ended(0, "Completed")}}, component="loader")
    world.pods[-1]["status"]["containerStatuses"] += others
    return world


def test_a_loader_that_ended_well_is_done_before_its_job_is(world: Callable[..., World]) -> None:
    waits = world(**CACHED).apply()
    assert not is_loaded(waits.plan, waits.objects, waits.pods)
    loaded = done(waits)
    assert is_loaded(loaded.plan, loaded.objects, loaded.pods)
    found = loaded.findings()
    assert found["Ready"].reason in PROGRESS
    assert not any(finding.is_fault for finding in found.values())


def test_engines_serve_beside_a_loader_whose_sidecar_runs_on(world: Callable[..., World]) -> None:
    proxy = {"name": "istio-proxy", **running(started=True, ready=True)}
    loaded = done(world(**CACHED).apply(), proxy).apply(loader_done=True)
    found = loaded.pod(running(started=True, ready=True), conditions=READY).findings()["Ready"]
    assert found.status == "True"
    assert "warning FinishedButSidecarRuns" in found.message
    assert "container istio-proxy of pod chat-load-" in found.message
    ready = [{"type": "Ready", "status": "True", "reason": found.reason, "message": found.message}]
    events = {event.reason: event for event in events_between({}, {"conditions": ready})}
    assert events["FinishedButSidecarRuns"].type == "Warning"
    assert "native sidecar" in events["FinishedButSidecarRuns"].message
    assert not events_between({"conditions": ready}, {"conditions": ready})


def test_a_sidecar_that_ends_before_the_loader_is_no_fault(world: Callable[..., World]) -> None:
    loads = world(**CACHED).apply().pod(running(started=True, ready=True), component="loader")
    loads.pods[-1]["status"]["containerStatuses"].append(
        {"name": "certs", "ready": False, "state": {"terminated": ended(0, "Completed")}}
    )
    assert loads.findings()["Ready"].reason == "Downloading"


def test_a_loader_is_found_by_its_job_however_its_name_is_cut(deployment: Make) -> None:
    """The API server cuts generated names at 58 characters, which a long name with the Job's suffix exceeds."""
    cut = World(deployment("a-name-of-48-characters-which-is-as-long-as-can", **CACHED))
    cut.apply().pod(waiting("ImagePullBackOff", PULL), component="loader")
    name = cut.pods[-1]["metadata"]["name"]
    cut.pods[-1]["metadata"]["name"] = name[:58]
    assert cut.findings()["Ready"].reason == "ImagePullFailed"


def test_a_finished_loader_is_not_reported(world: Callable[..., World]) -> None:
    done = world(**CACHED).apply(loader_done=True)
    (name,) = [name for kind, name in done.objects if kind == "Job"]
    done.condition("Job", name, type="Complete", status="True")
    found = done.pod(running(started=True, ready=True), conditions=READY).findings()
    assert found["Ready"].status == "True"

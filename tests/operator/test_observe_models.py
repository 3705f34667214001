"""Faults of models that a loader downloads to a volume: claims, Jobs and their pods, with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from observed_world import CACHED, PULL, READY, World, reported, running, unschedulable, waiting

from pagemill_crds.models import LLMDeployment

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


def test_for_a_job_that_gave_up_the_way_to_restart_it_is_named(world: Callable[..., World]) -> None:
    gone = world(**CACHED).apply()
    (name,) = [name for kind, name in gone.objects if kind == "Job"]
    gone.condition("Job", name, type="Failed", status="True", message="Job has reached the specified backoff limit")
    found = gone.findings()["Ready"]
    assert found.reason == "LoaderFailed"
    assert f"kubectl delete job {name}" in found.message


def test_a_finished_loader_is_not_reported(world: Callable[..., World]) -> None:
    done = world(**CACHED).apply(loader_done=True)
    (name,) = [name for kind, name in done.objects if kind == "Job"]
    done.condition("Job", name, type="Complete", status="True")
    found = done.pod(running(started=True, ready=True), conditions=READY).findings()
    assert found["Ready"].status == "True"

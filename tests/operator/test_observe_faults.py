"""The fault matrix: objects of a real cluster in each fault, and the reason and remedy that are derived from them.

Statuses and messages are those of Kubernetes 1.36 with containerd 2.4, shortened.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from observed_world import PULL, READY, World, ended, reported, running, unschedulable, waiting

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.observe import observe, scheduling
from pagemill_operator.backends.kubernetes.snapshot import ApplyError, Snapshot
from pagemill_operator.plan import Problem, make_plan
from pagemill_operator.status.conditions import find_conditions, merge_conditions

Make = Callable[..., LLMDeployment]
FORBIDDEN = 'pods "chat-engine-5d59d67564-x7k2p" is forbidden: '


@pytest.fixture
def world(deployment: Make) -> Callable[..., World]:
    return lambda **changes: World(deployment(**changes))


NODES = "0/3 nodes are available: {}. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
GPU_SHORT = NODES.format("1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint {a: b}")

PODS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "image": ({}, {"status": waiting("ErrImagePull", PULL)}, "ImagePullFailed", "spec.engine.image"),
    "image name": ({}, {"status": waiting("InvalidImageName", "x")}, "InvalidImageName", "spec.engine.image"),
    "image never": ({}, {"status": waiting("ErrImageNeverPull", "x")}, "ImageNotPresent", "pull policy"),
    "secret": (
        {},
        {"status": waiting("CreateContainerConfigError", 'secret "s" not found')},
        "MissingSecret",
        "spec.engine.env",
    ),
    "config map": (
        {},
        {"status": waiting("CreateContainerConfigError", "couldn't find key k in ConfigMap default/c")},
        "MissingConfigMap",
        "spec.engine.env",
    ),
    "command": (
        {},
        {"status": waiting("RunContainerError", 'exec: "/no": stat /no: no such file or directory')},
        "ContainerCannotStart",
        "spec.engine.image",
    ),
    "gpu": ({"resources": {"gpus": 1}}, unschedulable(GPU_SHORT), "InsufficientGPU", "spec.resources.gpus"),
    "gpu product": (
        {"resources": {"gpus": 1, "gpuProduct": "L4"}},
        unschedulable(NODES.format("3 node(s) didn't match Pod's node affinity/selector")),
        "GPUProductNotFound",
        "spec.resources.gpuProduct",
    ),
    "cpu": ({}, unschedulable(NODES.format("3 Insufficient cpu")), "InsufficientCPU", "spec.resources.cpu"),
    "memory": (
        {},
        unschedulable(NODES.format("1 Insufficient cpu, 2 Insufficient memory")),
        "InsufficientMemory",
        "spec.resources.memory",
    ),
    "disk": ({}, unschedulable(NODES.format("3 Insufficient ephemeral-storage")), "InsufficientResource", "template"),
    "selector": (
        {},
        unschedulable(NODES.format("3 node(s) didn't match Pod's node affinity/selector")),
        "NoMatchingNode",
        "spec.template",
    ),
    "volume elsewhere": (
        {},
        unschedulable(NODES.format("1 Insufficient nvidia.com/gpu, 2 node(s) had volume node affinity conflict")),
        "VolumeOnOtherNode",
        "delete the claim",
    ),
    "taint": ({}, unschedulable(NODES.format("3 node(s) had untolerated taint {a: b}")), "NodesTainted", "tolerations"),
    "full": ({}, unschedulable(NODES.format("3 Too many pods")), "TooManyPods", "add nodes"),
    "cordoned": ({}, unschedulable(NODES.format("3 node(s) were unschedulable")), "NodesCordoned", "uncordon"),
    "no nodes": ({}, unschedulable("no nodes available to schedule pods"), "NoNodes", "add one"),
    "other": ({}, unschedulable(NODES.format("3 node(s) are sad")), "Unschedulable", "kubectl describe pod"),
    "no claim": (
        {"model__source": "pvc://weights/x"},
        unschedulable('0/3 nodes are available: persistentvolumeclaim "weights" not found. not found'),
        "ClaimNotFound",
        "spec.model",
    ),
    "not found": (
        {},
        {"status": waiting("CrashLoopBackOff", last=reported("ModelNotFound", "`x` does not exist."))},
        "ModelNotFound",
        "spec.model.source",
    ),
    "architecture": (
        {},
        {"status": waiting("CrashLoopBackOff", last=reported("UnsupportedArchitecture", "`Mamba` is not known."))},
        "UnsupportedArchitecture",
        "spec.model.source",
    ),
    "too large": (
        {},
        {
            "status": running(
                started=True, last=reported("ModelTooLarge", "The weights take 9.1 GiB, 1.0 GiB are free.")
            )
        },
        "ModelTooLarge",
        "spec.resources.memory",
    ),
    "context": (
        {},
        {"status": waiting("CrashLoopBackOff", last=reported("MaxModelLenTooLarge", "MaxModelLenTooLarge: 9 > 8."))},
        "MaxModelLenTooLarge",
        "spec.engine",
    ),
    "oom": (
        {},
        {"status": waiting("CrashLoopBackOff", last=ended(137, "OOMKilled"))},
        "OOMKilled",
        "spec.resources.memory",
    ),
    "crash": ({}, {"status": waiting("CrashLoopBackOff", last=ended(1))}, "CrashLoop", "kubectl logs"),
    "probe": ({}, {"status": waiting("CrashLoopBackOff", last=ended(143))}, "ProbeFailing", "kubectl describe pod"),
    "gate": (
        {},
        {"node": "", "conditions": ({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"},)},
        "SchedulingGated",
        "spec.template",
    ),
}
"""For each row: changes of the spec, the pod, the reason, and a part of the remedy."""


@pytest.mark.parametrize("row", PODS)
def test_a_fault_of_a_pod_has_its_reason_and_remedy(world: Callable[..., World], row: str) -> None:
    changes, pod, reason, remedy = PODS[row]
    found = world(**changes).apply().pod(**pod).findings()
    assert found["Ready"].status == "False"
    assert found["Ready"].reason == reason
    assert remedy in found["Ready"].message
    stage = "Scheduled" if pod.get("node") == "" else "ModelLoaded"
    assert found[stage].reason == reason


def test_no_two_rows_share_a_reason() -> None:
    reasons = [reason for _, _, reason, _ in PODS.values()]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(
    "words",
    [
        "3 node(s) had volume node affinity conflict",
        "3 node(s) didn't match PersistentVolume's node affinity",
        "1 Insufficient cpu, 2 node(s) had no available volume zone",
    ],
)
def test_schedulers_of_all_versions_may_say_that_a_volume_is_elsewhere(words: str) -> None:
    assert scheduling.unschedulable(NODES.format(words), None).reason == "VolumeOnOtherNode"


CREATIONS = {
    "QuotaExceeded": ("exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2", "ResourceQuota"),
    "ResourcesRequired": ("failed quota: q: must specify limits.cpu for: engine", "spec.resources.cpu"),
    "PodSecurityViolation": ('violates PodSecurity "restricted:latest": host namespaces', "spec.template"),
    "LimitRangeViolation": ("maximum memory usage per Container is 1Gi, but limit is 2Gi", "LimitRange"),
    "PriorityClassNotFound": ("no PriorityClass with name nope was found", "priorityClassName"),
    "ServiceAccountNotFound": (
        'error looking up service account default/nope: serviceaccount "nope" not found',
        "serviceAccountName",
    ),
    "AdmissionDenied": (
        'admission webhook "v.x.dev" denied the request: RuntimeClass gvisor only',
        "follow its message",
    ),
    "PodsNotCreated": ("the moon is full", "kubectl describe replicaset"),
}


@pytest.mark.parametrize("reason", CREATIONS)
def test_a_pod_that_is_refused_has_its_reason_and_remedy(world: Callable[..., World], reason: str) -> None:
    words, remedy = CREATIONS[reason]
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": FORBIDDEN + words}
    found = world().apply().condition("Deployment", "chat-engine", **failure).findings()
    assert (found["Scheduled"].reason, found["Ready"].reason) == (reason, reason)
    assert remedy in found["Ready"].message
    assert "x7k2p" not in found["Ready"].message


APPLIES = {
    "InvalidTemplate": (("Deployment", 422, "Invalid", "spec.template.spec.dnsPolicy: Unsupported"), "spec.template"),
    "Forbidden": (("Deployment", 403, "Forbidden", 'User "x" cannot patch resource "deployments" in API'), "roles"),
    "QuotaExceeded": (("PersistentVolumeClaim", 403, "Forbidden", "exceeded quota: q"), "ResourceQuota"),
    "NameTaken": (("Service", 409, "AlreadyExists", "delete or rename it"), "rename"),
    "ChildRefused": (("Service", 400, "BadRequest", "no"), "log"),
}


@pytest.mark.parametrize("reason", APPLIES)
def test_a_child_that_is_refused_has_its_reason_and_remedy(world: Callable[..., World], reason: str) -> None:
    (kind, code, word, message), remedy = APPLIES[reason]
    refused = world().apply()
    refused.errors = [ApplyError(kind, "chat-engine", code, word, message)]
    found = refused.findings()
    assert found["Ready"].reason == reason
    assert remedy in found["Ready"].message


@pytest.mark.parametrize(
    ("kind", "code", "message", "reason"),
    [
        (
            "Deployment",
            422,
            "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: label it",
            "AdmissionDenied",
        ),
        ("Deployment", 403, 'admission webhook "v.x.dev" denied the request: no', "AdmissionDenied"),
        ("Service", 400, 'admission webhook "v.x.dev" denied the request: no', "AdmissionDenied"),
        ("Service", 403, 'services "chat-engine" is forbidden: not today', "AdmissionDenied"),
        (
            "PersistentVolumeClaim",
            403,
            'persistentvolumeclaims "chat-model" is forbidden: only dynamically provisioned pvc can be resized and the '
            "storageclass that provisions the pvc must support resize",
            "VolumeNotResizable",
        ),
        (
            "PersistentVolumeClaim",
            422,
            "spec.resources.requests.storage: Forbidden: field can not be less than status.capacity",
            "VolumeNotResizable",
        ),
        (
            "PersistentVolumeClaim",
            422,
            "spec: Forbidden: spec is immutable after creation except resources.requests for bound claims",
            "VolumeNotResizable",
        ),
    ],
)
def test_a_refusal_that_is_not_the_roles_fault_names_its_cause(
    world: Callable[..., World], kind: str, code: int, message: str, reason: str
) -> None:
    refused = world().apply()
    refused.errors = [ApplyError(kind, "chat", code, "Forbidden", message)]
    found = refused.findings()
    assert (found["Scheduled"].reason, found["Ready"].reason) == (reason, reason)
    assert "roles" not in found["Ready"].message


def test_a_field_of_the_wrong_type_is_an_invalid_template(world: Callable[..., World]) -> None:
    """Server-side apply answers 500 to these."""
    refused = world()
    message = (
        "failed to create typed patch object (default/chat-engine; apps/v1, Kind=Deployment): "
        ".spec.template.spec.nosuch: field not declared in schema"
    )
    refused.errors = [ApplyError("Deployment", "chat-engine", 500, "", message)]
    found = refused.findings()
    assert (found["Planned"].status, found["Planned"].reason) == ("False", "InvalidTemplate")
    assert ".spec.template.spec.nosuch: field not declared" in found["Ready"].message
    assert found["Scheduled"].reason == "NotPlanned"


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (
            [
                waiting("ErrImagePull", PULL),
                waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}'),
            ],
            "ImagePullFailed",
        ),
        (
            [
                {"state": {"terminated": reported("ModelTooLarge", "1.2 GiB are free.")}, "ready": False},
                waiting("CrashLoopBackOff", "back-off 10s", reported("ModelTooLarge", "1.2 GiB are free.")),
                running(started=False, last=reported("ModelTooLarge", "1.2 GiB are free.")),
                running(started=True, last=reported("ModelTooLarge", "1.2 GiB are free.")),
            ],
            "ModelTooLarge",
        ),
    ],
    ids=["image", "crash"],
)
def test_a_repeating_fault_has_the_same_reason_in_each_of_its_states(
    world: Callable[..., World], states: list[dict[str, Any]], reason: str
) -> None:
    found = [world().apply().pod(state).findings() for state in states]
    assert {each["Ready"].reason for each in found} == {reason}
    assert len({each["Ready"].message for each in found}) == 1


def test_changed_counts_of_nodes_do_not_change_the_message(world: Callable[..., World]) -> None:
    messages = [NODES.format(f"{n} Insufficient cpu, 1 node(s) had untolerated taint {{a: b}}") for n in (2, 7)]
    messages.append(NODES.format("1 node(s) had untolerated taint {a: b}, 9 Insufficient cpu"))
    found = [world().apply().pod(**unschedulable(message)).findings()["Ready"] for message in messages]
    assert len(set(found)) == 1


def test_an_out_of_memory_kill_takes_precedence_over_other_messages(world: Callable[..., World]) -> None:
    died = {**reported("EngineDied", "The engine process ended: signal 9."), "reason": "OOMKilled"}
    assert world().apply().pod(waiting("CrashLoopBackOff", last=died)).findings()["Ready"].reason == "OOMKilled"
    known = {**reported("ModelTooLarge", "x"), "reason": "OOMKilled"}
    assert world().apply().pod(waiting("CrashLoopBackOff", last=known)).findings()["Ready"].reason == "ModelTooLarge"


def test_an_engine_without_a_reason_for_its_death_is_a_crash_loop(world: Callable[..., World]) -> None:
    last = reported("EngineDied", "The engine process ended: exit code 3.")
    found = world().apply().pod(waiting("CrashLoopBackOff", last=last)).findings()["Ready"]
    assert found.reason == "CrashLoop"
    assert "exit code 3" in found.message


@pytest.mark.parametrize("reason", ["exit status 1", "nope", "Nicht möglich", "A" * 65, "", 7, None])
def test_messages_of_another_program_never_become_a_reason(world: Callable[..., World], reason: Any) -> None:
    last = ended(1, message=json.dumps({"reason": reason, "message": "x"}))
    found = world().apply().pod(waiting("CrashLoopBackOff", last=last)).findings()
    assert found["Ready"].reason == "CrashLoop"
    assert merge_conditions([], list(found.values()), 1, "2026-01-01T00:00:00Z")


def test_loading_and_starting_are_not_faults(world: Callable[..., World]) -> None:
    for status in (None, waiting("ContainerCreating"), running(started=False), running(started=True)):
        found = world().apply().pod(status).findings()
        assert found["Ready"].reason == "Loading"
        assert found["Scheduled"].status == "True"


def test_a_pod_that_was_ready_and_no_longer_is_fails_its_probe(world: Callable[..., World]) -> None:
    since = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:05:00Z"}
    found = world().apply().pod(running(started=True), conditions=(since,)).findings()
    assert found["Ready"].reason == "ProbeFailing"
    early = {**since, "lastTransitionTime": "2026-01-01T00:00:09Z"}
    assert world().apply().pod(running(started=True), conditions=(early,)).findings()["Ready"].reason == "Loading"


def test_a_pod_on_a_dead_node_does_not_fail_its_probe(world: Callable[..., World]) -> None:
    """Its containers are not reported any more and stay as they were; the cluster changes only the pod."""
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:05:00Z"}
    containers = {"type": "ContainersReady", "status": "True"}
    found = world().apply().pod(running(started=True, ready=True), conditions=(unready, containers)).findings()
    assert found["Ready"].reason == "NodeLost"
    assert "node-1" in found["Ready"].message
    gated = {**unready, "reason": "ReadinessGatesNotReady"}
    found = world().apply().pod(running(started=True, ready=True), conditions=(gated, containers)).findings()
    assert found["Ready"].reason != "NodeLost"


def test_a_container_that_the_user_added_is_named(world: Callable[..., World]) -> None:
    side = world().apply().pod(running(started=True))
    side.pods[0]["status"]["containerStatuses"].append({"name": "side", **waiting("ImagePullBackOff", PULL)})
    found = side.findings()["Ready"]
    assert found.reason == "ImagePullFailed"
    assert found.message.startswith("container side: ")


def test_for_an_image_volume_the_models_source_is_named(world: Callable[..., World]) -> None:
    model = {"source": "oci://host:5000/team/m:v1", "cache": {"imageVolume": True}}
    pull = 'failed to pull and unpack image "host:5000/team/m:v1": 401 Unauthorized'
    found = world(model=model).apply().pod(waiting("ErrImagePull", pull)).findings()["Ready"]
    assert found.reason == "ImagePullFailed"
    for part in ("host:5000/team/m:v1", "401", "spec.model.source", "spec.model.credentialsSecretRef"):
        assert part in found.message
    assert "spec.engine.image" not in found.message


@pytest.mark.parametrize(("mode", "replicas"), [("Active", 1), ("Active", 0), ("External", 1), ("Advisory", 1)])
def test_an_autoscaler_that_the_operator_overrules_is_named(deployment: Make, mode: str, replicas: int) -> None:
    """In the other modes its number counts, as it writes spec.replicas."""
    world = World(deployment(replicas=replicas, autoscaling={"mode": mode, "minReplicas": 0, "maxReplicas": 2}))
    if replicas:
        world.apply().pod(running(started=True, ready=True), conditions=READY)
    seen = observe(dataclasses.replace(world.snapshot, autoscalers=("chat-hpa",)), world.plan)
    (ready,) = [each for each in find_conditions(seen) if each.type == "Ready"]
    assert ready.status == str(bool(replicas))
    named = "warning AutoscalerIgnored: the number of replicas that HorizontalPodAutoscaler chat-hpa writes is ignored"
    assert (named in ready.message) == (mode == "Active")


def test_ready_pods_of_the_newest_template_make_the_deployment_ready(world: Callable[..., World]) -> None:
    ready = world(replicas=2).apply()
    ready.pod(running(started=True, ready=True), conditions=READY)
    assert ready.findings()["Ready"].reason == "Progressing"
    found = ready.pod(running(started=True, ready=True), conditions=READY).findings()
    assert [found[kind].status for kind in ("Planned", "Scheduled", "ModelLoaded", "Serving", "Ready")] == ["True"] * 5


def test_pods_count_only_for_the_current_generation_of_the_deployment(world: Callable[..., World]) -> None:
    """Right after an edit, the old Deployment exists with all its pods ready."""
    ready = world().apply().pod(running(started=True, ready=True), conditions=READY)
    ready.generation += 1
    found = ready.findings()
    assert found["Ready"].status == "False"
    assert found["Serving"].status == "True"


def test_a_failed_rollout_while_old_pods_serve_reports_both(world: Callable[..., World], deployment: Make) -> None:
    rolling = world().apply()
    old_template = copy.deepcopy(rolling.objects["Deployment", "chat-engine"]["spec"]["template"])
    rolling.plan = make_plan(deployment(engine__image="nope:1"), "kubernetes")
    rolling.apply().pod(running(started=True, ready=True), conditions=READY, template=old_template)
    found = rolling.pod(waiting("ErrImagePull", PULL)).findings()
    assert found["Serving"].status == "True"
    assert (found["ModelLoaded"].status, found["ModelLoaded"].reason) == ("False", "ImagePullFailed")
    assert (found["Ready"].status, found["Ready"].reason) == ("False", "ImagePullFailed")
    assert "earlier spec still serve" in found["Ready"].message


def test_the_crash_of_one_of_two_pods_is_the_reason(world: Callable[..., World]) -> None:
    half = world(replicas=2).apply().pod(running(started=True, ready=True), conditions=READY)
    found = half.pod(waiting("CrashLoopBackOff", last=ended(137, "OOMKilled"))).findings()
    assert found["ModelLoaded"].status == "True"
    assert found["Serving"].status == "True"
    assert found["Ready"].reason == "OOMKilled"


def test_ending_and_evicted_pods_do_not_count(world: Callable[..., World]) -> None:
    mixed = world().apply().pod(waiting("CrashLoopBackOff", last=ended(1)), deletionTimestamp="2026-01-01T00:00:00Z")
    mixed.pod(waiting("CrashLoopBackOff", last=ended(1))).pods[-1]["status"]["phase"] = "Failed"
    found = mixed.pod(running(started=True, ready=True), conditions=READY).findings()
    assert found["Ready"].status == "True"


def test_without_a_gateway_nothing_is_served(world: Callable[..., World]) -> None:
    alone = world().apply().pod(running(started=True, ready=True), conditions=READY)
    alone.num_gateways_ready = 0
    found = alone.findings()
    assert (found["Ready"].reason, found["Serving"].reason) == ("GatewayNotReady", "GatewayNotReady")
    assert "no gateway pod is ready" in found["Ready"].message
    alone.num_gateways = 0
    assert "gateway.replicas" in alone.findings()["Ready"].message


def test_a_source_that_only_pods_can_read_is_unknown_until_one_has(world: Callable[..., World]) -> None:
    loading = world().apply().pod(running(started=True))
    assert loading.findings()["Planned"][1:3] == ("Unknown", "SourceNotReadable")
    ready = world().apply().pod(running(started=True, ready=True), conditions=READY)
    assert ready.findings()["Planned"].status == "True"


def test_a_plan_that_has_worked_stays_known(world: Callable[..., World]) -> None:
    again = world().apply().pod(running(started=True))
    again.status = {"conditions": [{"type": "Planned", "status": "True", "observedGeneration": 0}]}
    assert again.findings()["Planned"].status == "True"
    again.generation = 1
    assert again.findings()["Planned"].status == "Unknown"


def test_a_conflict_and_an_unreadable_spec_take_precedence(world: Callable[..., World]) -> None:
    taken = world()
    taken.conflict = Problem("spec.model.name", "m", "default/a serves the name m already; choose another name")
    found = taken.findings()
    assert (found["Ready"].reason, found["Scheduled"].reason) == ("NameConflict", "NotPlanned")
    snapshot = Snapshot(owner=taken.snapshot.owner, invalid=(Problem("spec.engine.x", 1, "unknown field"),))
    unreadable = {finding.type: finding for finding in find_conditions(observe(snapshot, None))}
    assert unreadable["Ready"].reason == "InvalidSpec"
    assert "spec.engine.x: unknown field" in unreadable["Ready"].message


def test_an_edit_that_cannot_be_planned_leaves_the_old_pods_serving(world: Callable[..., World]) -> None:
    serving = world().apply().pod(running(started=True, ready=True), conditions=READY)
    serving.generation += 1
    snapshot = Snapshot(
        owner=serving.snapshot.owner,
        children=serving.objects,
        pods=tuple(serving.pods),
        num_gateways=1,
        num_gateways_ready=1,
        invalid=(Problem("spec.x", 1, "unknown field"),),
    )
    found = {finding.type: finding for finding in find_conditions(observe(snapshot, None))}
    assert found["Serving"].status == "True"
    assert found["Ready"].status == "False"
    assert "earlier spec still serve" in found["Ready"].message

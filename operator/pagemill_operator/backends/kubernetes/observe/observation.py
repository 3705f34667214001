"""Turns a snapshot into an observation: the plan's pods, their phases, and what keeps pods from existing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from pagemill_operator.backends.kubernetes.in_place import Rollout, rollout_of
from pagemill_operator.backends.kubernetes.model_volume import is_loaded, left_running
from pagemill_operator.backends.kubernetes.observe.cause import Cause
from pagemill_operator.backends.kubernetes.observe.creation import not_applied, not_created
from pagemill_operator.backends.kubernetes.observe.groups import (
    GROUPS_S,
    HALF_PLACED_S,
    absent_group,
    groups_not_made,
    observe_group,
    reported,
    workers_of,
)
from pagemill_operator.backends.kubernetes.observe.pods import left_s, observe_pod, runs_loader
from pagemill_operator.backends.kubernetes.observe.scheduling import volume_message
from pagemill_operator.backends.kubernetes.ownership import controls, is_ready
from pagemill_operator.backends.kubernetes.render.loader import loader_name
from pagemill_operator.backends.kubernetes.render.names import (
    ENGINE,
    GENERATION_ANNOTATION,
    LOADER,
    WORKER,
    claim_name,
    engine_name,
    pod_template,
    template_of,
    workload_at,
)
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Snapshot
from pagemill_operator.plan.types import Plan, Problem, Process
from pagemill_operator.status.observation import Fault, Observation, ReplicaObservation

VOLUME_S = 30.0
"""Seconds that a claim may wait for its volume before that is a fault."""
LOADER_POD_S = 15.0
"""Seconds that a Job may be without a pod before that is a fault."""
PROGRESS_S = 5.0
"""Seconds between two reads of a loader's progress."""
UNREACHABLE = ("HubUnreachable", "SourceUnreachable")
"""Reasons of loaders and engines that get no answer from a source."""
OLDER = "older"
"""The digest of pods that were not made from the plan."""


def observe(snapshot: Snapshot, plan: Plan | None, now: datetime | None = None) -> Observation:
    """Return the observation of a deployment. `plan` is None if the spec cannot be read (see `snapshot.invalid`).

    Without `now`, neither a missing volume nor a missing loader pod is reported.
    """
    rollout = rollout_of(plan, snapshot.owner, snapshot.children, snapshot.pods, now) if plan and now else Rollout()
    replicas = tuple(_with_remedy(each, rollout) for each in _replicas(snapshot, plan, now))
    loader = _loader(snapshot, plan, now) if plan else None
    return Observation(
        plan=plan,
        replicas=replicas,
        gateway_ready=snapshot.num_gateways_ready > 0,
        gateway_message=_gateway_message(snapshot),
        conflict=snapshot.conflict,
        unplanned=_unplanned(snapshot, plan, replicas) if plan else None,
        invalid=snapshot.invalid,
        fault=_fault(snapshot, plan, loader, now),
        loader=loader,
        warnings=tuple(_warnings(snapshot, plan)) if plan else (),
        progress=snapshot.progress,
        rollout=rollout.remedy if rollout.in_place else "",
        requeue_after_s=_sooner(_requeue_after_s(snapshot, plan, now), rollout.wait_s),
    )


def _with_remedy(replica: ReplicaObservation, rollout: Rollout) -> ReplicaObservation:
    """Add what the rollout does, or how to let it go on, to the cause of a replica that finds no node."""
    if replica.phase != "pending" or not replica.reason or replica.digest == OLDER or not rollout.remedy:
        return replica
    return replace(replica, message=f"{replica.message}; {rollout.remedy}")


def _sooner(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)


def _warnings(snapshot: Snapshot, plan: Plan) -> Iterator[Fault]:
    if running := left_running(plan, snapshot.children, snapshot.pods):
        remedy = (
            "make it a native sidecar (an init container with restartPolicy: Always), or keep it out of the loader's "
            "pod with its injector's label or annotation in spec.template.metadata"
        )
        message = f"the loader has finished, and {', '.join(running)} still runs, so that its Job never completes"
        yield Fault("ModelLoaded", "FinishedButSidecarRuns", f"{message}: {remedy}")
    if snapshot.autoscalers and plan.autoscaling is not None and plan.autoscaling.mode == "Active":
        named = f"HorizontalPodAutoscaler {', '.join(snapshot.autoscalers)}"
        message = f"the number of replicas that {named} writes is ignored, since spec.autoscaling.mode is Active"
        yield Fault("Scheduled", "AutoscalerIgnored", f"{message}: delete it, or set the mode to External")


def _replicas(snapshot: Snapshot, plan: Plan | None, now: datetime | None) -> list[ReplicaObservation]:
    current = _current_template(snapshot, plan)
    process = plan.groups[0].process if plan else None

    def observed(pod: Manifest) -> ReplicaObservation:
        digest = plan.groups[0].digest if plan and template_of(pod) == current else OLDER
        sleeps = pod["metadata"].get("uid") in snapshot.asleep
        seen = observe_pod(pod, ENGINE, digest, process, sleeps=sleeps, loads=bool(snapshot.progress))
        return _with_policy(snapshot, _with_claim(snapshot, seen, now))

    workers, before = snapshot.component_pods(WORKER), reported(snapshot.owner, plan)
    found = [
        observe_group(pod, observed(pod), [(each, observed(each)) for each in workers_of(pod, workers)], before, now)
        for pod in snapshot.component_pods(ENGINE)
    ]
    return [*found, *absent_group(before, found, plan)] if plan and plan.pods_per_replica > 1 else found


def _current_template(snapshot: Snapshot, plan: Plan | None) -> str | None:
    """Return the digest of the pod template of this generation of the spec, or None if there is none yet."""
    workload = snapshot.child(*workload_at(plan)) if plan else None
    if workload is None or _annotations(workload).get(GENERATION_ANNOTATION) != str(snapshot.generation):
        return None
    return template_of(pod_template(workload)) or None


def _loader(snapshot: Snapshot, plan: Plan, now: datetime | None) -> ReplicaObservation | None:
    """Return the state of the loader, or None if engines do not wait for one."""
    name = loader_name(plan)
    if name is None:
        return None
    if is_loaded(plan, snapshot.children, snapshot.pods):
        return None
    job = snapshot.child("Job", name)
    pods = [pod for pod in snapshot.component_pods(LOADER) if job is not None and controls(job, pod)]
    if pods:
        seen = _with_claim(snapshot, _observe_loader(pods[-1], snapshot, plan), now)
        if seen.live:
            return seen
    if job and (failed := _is_true(job, "Failed")):
        message = f"the loader gave up ({failed.get('message', '')}): to start it again, kubectl delete job {name}"
        return ReplicaObservation(name, "crashed", "", "LoaderFailed", message)
    if job and now and _waits_for_its_pod(job) and not pods and not left_s(job, LOADER_POD_S, now):
        message = (
            f"the loader's pod is refused: kubectl describe job {name} names the cause, such as a ResourceQuota, a "
            "LimitRange or the namespace's Pod Security profile"
        )
        return ReplicaObservation(name, "pending", "", "PodsNotCreated", message)
    return ReplicaObservation(name, "starting")


def _observe_loader(pod: Manifest, snapshot: Snapshot, plan: Plan) -> ReplicaObservation:
    seen = observe_pod(pod, LOADER, "", _loader_process(plan), loads=bool(snapshot.progress))
    return _with_policy(snapshot, seen)


def _with_policy(snapshot: Snapshot, seen: ReplicaObservation) -> ReplicaObservation:
    """Name the policy that may keep a pod from its source: the pod itself only sees that no connection opens."""
    if seen.reason not in UNREACHABLE:
        return seen
    policy = (
        f"The NetworkPolicy {engine_name(snapshot.name)} lets the pods reach DNS, and the ports of the source and of "
        "proxies in the engines' environment; operator.settings.engine_extra_egress of the chart adds others, and "
        "other policies of the namespace (kubectl get networkpolicy) may forbid more"
    )
    return replace(seen, message=f"{seen.message.rstrip('. ')}. {policy}")


def _waits_for_its_pod(job: Manifest) -> bool:
    return not job["metadata"].get("deletionTimestamp") and not (job.get("status") or {}).get("active")


def _requeue_after_s(snapshot: Snapshot, plan: Plan | None, now: datetime | None) -> float | None:
    """Return the seconds until something missing becomes a fault, or None; no cluster event marks that moment."""
    waits = []
    claim = snapshot.child("PersistentVolumeClaim", claim_name(snapshot.name))
    if claim and _is_pending(claim):
        waits.append(left_s(claim, VOLUME_S, now))
    if any(map(runs_loader, snapshot.pods)):
        waits.append(PROGRESS_S)
    if plan is not None and plan.pods_per_replica > 1:
        waits += [left_s(pod, HALF_PLACED_S, now) for pod in snapshot.component_pods(ENGINE) if not is_ready(pod)]
        if groups := snapshot.child(*workload_at(plan)):
            waits.append(left_s(groups, GROUPS_S, now))
    job = snapshot.child("Job", (plan and loader_name(plan)) or "")
    if job and _waits_for_its_pod(job) and not _is_true(job, "Complete"):
        waits.append(left_s(job, LOADER_POD_S, now))
    return min((wait for wait in waits if wait > 0), default=None)


def _loader_process(plan: Plan) -> Process:
    """Return a process without GPUs that has the engines' placement: the loader runs where engines can run."""
    process = plan.groups[0].process
    return Process(process.module, {}, gpu_product=process.gpu_product)


def _with_claim(snapshot: Snapshot, seen: ReplicaObservation, now: datetime | None) -> ReplicaObservation:
    """Add a missing volume as the cause of a pod that is pending without a message from the scheduler."""
    claim = snapshot.child("PersistentVolumeClaim", claim_name(snapshot.name))
    if claim is None or not _is_pending(claim):
        return seen
    if seen.phase != "pending" or seen.reason not in ("", "VolumePending"):
        return seen
    if left_s(claim, VOLUME_S, now):
        return ReplicaObservation(seen.name, seen.phase, seen.digest)
    message = volume_message(claim["metadata"]["name"], claim["spec"].get("storageClassName"))
    return ReplicaObservation(seen.name, seen.phase, seen.digest, "VolumePending", message)


def _fault(
    snapshot: Snapshot, plan: Plan | None, loader: ReplicaObservation | None, now: datetime | None
) -> Fault | None:
    """Return what keeps pods from existing or from becoming ready, or None."""
    if snapshot.apply_errors:
        return min((not_applied(error) for error in snapshot.apply_errors), key=lambda fault: fault.stage != "Planned")
    if lost := _lost_claim(snapshot):
        return Fault("Scheduled", *lost)
    if plan is not None and plan.pods_per_replica > 1:
        groups = snapshot.child(*workload_at(plan))
        has_pods = bool(snapshot.component_pods(ENGINE)) or reported(snapshot.owner, plan).lasts
        return None if groups is None or has_pods else groups_not_made(groups, left_s(groups, GROUPS_S, now))
    deployment = snapshot.child("Deployment", engine_name(snapshot.name))
    if deployment is None or loader is not None:
        return None
    if failure := _is_true(deployment, "ReplicaFailure"):
        return Fault("Scheduled", *not_created(str(failure.get("message", ""))))
    progressing = _condition(deployment, "Progressing")
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        message = "replicas are not ready long after they were started: read the engines' logs"
        return Fault("ModelLoaded", "ProgressDeadlineExceeded", message)
    return None


def _lost_claim(snapshot: Snapshot) -> Cause | None:
    for claim in snapshot.of_kind("PersistentVolumeClaim"):
        if claim.get("status", {}).get("phase") == "Lost":
            name = claim["metadata"]["name"]
            remedy = f"delete the claim (kubectl delete pvc {name}), and the model is loaded again"
            return Cause("VolumeLost", f"the volume of claim {name} is gone: {remedy}")
    return None


def _unplanned(snapshot: Snapshot, plan: Plan, replicas: tuple[ReplicaObservation, ...]) -> Problem | None:
    """Return the problem that the plan is unverified: only pods can read the source, and none has yet."""
    digests = {group.digest for group in plan.groups}
    if any(replica.phase == "ready" and replica.digest in digests for replica in replicas):
        return None
    known = _condition(snapshot.owner, "Planned")
    if known.get("status") == "True" and known.get("observedGeneration") == snapshot.generation:
        return None
    message = "only the engine's pods can read the model; whether it fits is known once the first one has loaded it"
    return Problem("spec.model.source", plan.source, message)


def _gateway_message(snapshot: Snapshot) -> str:
    if snapshot.num_gateways == 0:
        return "no gateway pod runs in the release's namespace: check its Deployment and the chart's gateway.replicas"
    return "no gateway pod is ready: see kubectl describe pod for the gateway's pods, and read their logs"


def _is_pending(claim: Manifest) -> bool:
    return bool(claim.get("status", {}).get("phase") == "Pending")


def _annotations(manifest: Manifest) -> dict[str, str]:
    return manifest.get("metadata", {}).get("annotations") or {}


def _condition(manifest: Manifest, kind: str) -> dict[str, Any]:
    conditions = (manifest.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _is_true(manifest: Manifest, kind: str) -> dict[str, Any] | None:
    condition = _condition(manifest, kind)
    return condition if condition.get("status") == "True" else None

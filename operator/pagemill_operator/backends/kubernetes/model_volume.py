"""Decides whether a cached model lies in its volume, and which loader Jobs must be replaced. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from pagemill_operator.backends.kubernetes.ownership import Children, controller_of, controls, is_ending
from pagemill_operator.backends.kubernetes.render.loader import loader_name
from pagemill_operator.backends.kubernetes.render.names import LOADER, claim_name
from pagemill_operator.backends.kubernetes.snapshot import DIGEST_ANNOTATION, Manifest
from pagemill_operator.plan.types import Plan


def is_loaded(plan: Plan, children: Children, pods: Iterable[Manifest]) -> bool:
    """Whether the Job of the plan's source has filled the current volume; always False without a cache.

    The exit of the loader's container counts: the Job succeeds later, and never while a container that another
    controller added to its pod still runs.
    """
    job = children.get(("Job", loader_name(plan) or ""))
    if job is None or _is_for_another_volume(plan, job, children):
        return False
    return has_succeeded(job) or any(controls(job, pod) and has_loaded(pod) for pod in pods)


def outdated_jobs(plan: Plan, wanted: Iterable[Manifest], children: Children) -> Iterator[Manifest]:
    """Yield Jobs that filled a deleted volume, or that run with outdated settings.

    A Job's template is immutable. What an old Job has loaded stays in the volume, and the next one continues there.
    """
    for manifest in wanted:
        job = children.get((manifest["kind"], manifest["metadata"]["name"]))
        if manifest["kind"] != "Job" or job is None or is_ending(job):
            continue
        is_changed = _digest(job) != _digest(manifest) and not has_succeeded(job)
        if is_changed or _is_for_another_volume(plan, job, children):
            yield job


def orphaned_jobs(
    wanted: Iterable[Manifest], children: Children, outdated: Collection[Manifest]
) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each Job that has no owner and is not `outdated`, after its wanted manifest: nothing would delete it."""
    for manifest in wanted:
        job = children.get((manifest["kind"], manifest["metadata"]["name"]))
        if manifest["kind"] == "Job" and job is not None and job not in outdated and controller_of(job) is None:
            yield manifest, job


def has_loaded(pod: Manifest) -> bool:
    """Whether the loader of this pod has ended well; it is not started again then."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    ended = [each.get("state", {}).get("terminated") for each in statuses if each["name"] == LOADER]
    return any(each is not None and each.get("exitCode") == 0 for each in ended)


def left_running(plan: Plan, children: Children, pods: Iterable[Manifest]) -> list[str]:
    """Return the containers that still run in a pod whose loader has ended well, as `container NAME of pod NAME`."""
    job = children.get(("Job", loader_name(plan) or ""))
    finished = [pod for pod in pods if job is not None and controls(job, pod) and has_loaded(pod)]
    return [
        f"container {each['name']} of pod {pod['metadata']['name']}"
        for pod in finished
        for each in pod["status"]["containerStatuses"]
        if "running" in each.get("state", {})
    ]


def has_succeeded(job: Manifest) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Complete" and condition["status"] == "True" for condition in conditions)


def _is_for_another_volume(plan: Plan, job: Manifest, children: Children) -> bool:
    """Whether the Job filled an earlier volume: our claim is created before its Job. A claim of the user is not
    watched.
    """
    if plan.cache is None or plan.cache.size is None:
        return False
    claim = children.get(("PersistentVolumeClaim", claim_name(plan.name)))
    return has_succeeded(job) if claim is None else _created(job) < _created(claim)


def _created(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("creationTimestamp", ""))


def _digest(manifest: Manifest) -> str | None:
    annotations: dict[str, str] = manifest["metadata"].get("annotations") or {}
    return annotations.get(DIGEST_ANNOTATION)

"""Whether a cached model lies in its volume, and which loader Jobs have to begin anew. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagemill_operator.backends.kubernetes.ownership import Children, is_ending
from pagemill_operator.backends.kubernetes.render.loader import loader_name
from pagemill_operator.backends.kubernetes.render.names import claim_name
from pagemill_operator.backends.kubernetes.snapshot import DIGEST_ANNOTATION, Manifest
from pagemill_operator.plan.types import Plan


def is_loaded(plan: Plan, children: Children) -> bool:
    """The Job of the plan's source has filled the volume that is there now; always False without a cache."""
    job = children.get(("Job", loader_name(plan) or ""))
    return job is not None and has_succeeded(job) and not _is_for_another_volume(plan, job, children)


def outdated_jobs(plan: Plan, wanted: Iterable[Manifest], children: Children) -> Iterator[Manifest]:
    """Jobs that filled a volume that is gone, or that run on as the spec was before.

    A Job's template cannot be changed. What it has loaded so far lies in the volume, and the next one goes on there.
    """
    for manifest in wanted:
        job = children.get((manifest["kind"], manifest["metadata"]["name"]))
        if manifest["kind"] != "Job" or job is None or is_ending(job):
            continue
        is_changed = _digest(job) != _digest(manifest) and not has_succeeded(job)
        if is_changed or _is_for_another_volume(plan, job, children):
            yield job


def has_succeeded(job: Manifest) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Complete" and condition["status"] == "True" for condition in conditions)


def _is_for_another_volume(plan: Plan, job: Manifest, children: Children) -> bool:
    """Our claim comes before its Job; a claim of the user is not seen."""
    if plan.cache is None or plan.cache.size is None:
        return False
    claim = children.get(("PersistentVolumeClaim", claim_name(plan.name)))
    return has_succeeded(job) if claim is None else _created(job) < _created(claim)


def _created(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("creationTimestamp", ""))


def _digest(manifest: Manifest) -> str | None:
    annotations: dict[str, str] = manifest["metadata"].get("annotations") or {}
    return annotations.get(DIGEST_ANNOTATION)

"""Decides whether a cached model lies in its volume, and which loader Jobs must be replaced. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagemill_operator.backends.kubernetes.ownership import Children, is_ending
from pagemill_operator.backends.kubernetes.render.loader import loader_name
from pagemill_operator.backends.kubernetes.render.names import claim_name
from pagemill_operator.backends.kubernetes.snapshot import DIGEST_ANNOTATION, Manifest
from pagemill_operator.plan.types import Plan


def is_loaded(plan: Plan, children: Children) -> bool:
    """Whether the Job of the plan's source has filled the current volume; always False without a cache."""
    job = children.get(("Job", loader_name(plan) or ""))
    return job is not None and has_succeeded(job) and not _is_for_another_volume(plan, job, children)


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

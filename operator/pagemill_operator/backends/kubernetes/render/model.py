"""Computes where a plan's model lies in the pods: the claim that is mounted and the path that the engine opens."""

from __future__ import annotations

from typing import Any

from pagemill_models.sources import find_kind
from pagemill_operator.backends.kubernetes.render.names import claim_name, digest
from pagemill_operator.plan.pod_template import KERNELS_VOLUME, MODEL_PATH, file_url, mounted_file
from pagemill_operator.plan.types import Plan


def model_claim(plan: Plan) -> str | None:
    """Return the name of the PersistentVolumeClaim that holds the model, or None."""
    if plan.cache is not None:
        return (plan.cache.claim_name or claim_name(plan.name)) if plan.cache.has_claim else None
    scheme, _, rest = plan.source.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else None


def model_volume(plan: Plan, *, writable: bool) -> dict[str, Any] | None:
    """Return the pod's volume `model`, or None if the engine reads its source itself. A loader needs it `writable`."""
    cache = plan.cache
    if cache is not None and cache.image_volume:
        reference = plan.source.removeprefix("oci://")
        return {"name": "model", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    if cache is not None and cache.host_path is not None:
        return {"name": "model", "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    if (claim := model_claim(plan)) is None:
        return None
    source: dict[str, Any] = {"claimName": claim}
    if not writable and not keeps_kernels(plan):
        source["readOnly"] = True
    return {"name": "model", "persistentVolumeClaim": source}


def loaded_sources(plan: Plan) -> list[str]:
    """Return what a loader fetches: the model, and what drafts for it if that is remote, too."""
    draft = plan.draft_source
    return [plan.source] if draft is None or not find_kind(draft).is_remote else [plan.source, draft]


def source_folder(source: str) -> str:
    """Return the folder that the loader fills with this source; each source has its own."""
    return f"{MODEL_PATH}/{digest(source, 8)}"


def keeps_kernels(plan: Plan) -> bool:
    """Whether a GPU's compiled kernels are kept on the volume that the loader fills."""
    return plan.cache is not None and not plan.cache.image_volume and plan.groups[0].process.gpus > 0


def kernels_folder() -> str:
    """Return the kernels' folder as the loader sees it. The loader creates it: the kubelet's would belong to root."""
    return f"{MODEL_PATH}/{KERNELS_VOLUME}"


def opened_source(plan: Plan, source: str) -> str:
    """Return the source, of the model or of what drafts, as the engine opens it."""
    cache = plan.cache
    if cache is not None and cache.image_volume:
        return file_url(MODEL_PATH) if source == plan.source else source
    if cache is not None and source in loaded_sources(plan):
        return file_url(f"{source_folder(source)}/{find_kind(source).file_of(source) or ''}")
    return mounted_file(source) if source.startswith("pvc://") else source

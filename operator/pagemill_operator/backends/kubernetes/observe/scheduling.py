"""Finds why the scheduler places a pod on no node, from the message of its PodScheduled condition.

The message counts nodes for each cause (`0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint
...`). The counts are left out, because they change by themselves.
"""

from __future__ import annotations

import re

from pagemill_operator.backends.kubernetes.observe.cause import Cause, quote
from pagemill_operator.backends.kubernetes.render.container import GPU
from pagemill_operator.plan.types import Process

_NO_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_VOLUME = re.compile(r"persistent ?volume|storageclass|volume binding", re.IGNORECASE)
_ELSEWHERE = ("PersistentVolume's node affinity", "volume node affinity", "no available volume zone")
"""What newer and older schedulers say of a bound volume that only other nodes can mount, and of one in another zone."""
_INSUFFICIENT = re.compile(r"Insufficient ([\w./-]+)")


def unschedulable(message: str, process: Process | None) -> Cause:
    """Return the cause of an unschedulable pod. `process` is what the pod asks for, if known."""
    text = causes_of(message)
    for judge in (_volumes, _gpus, _amounts, _nodes):
        if cause := judge(text, process):
            return cause
    return Cause("Unschedulable", f"no node takes the pod: {quote(text)}; see kubectl describe pod")


def causes_of(message: str) -> str:
    """Return the scheduler's causes without node counts, each once, in a stable order."""
    first, *_ = re.split(r"[.;,]? (?:preemption|no new claims|not found$)", message, maxsplit=1)
    first = re.sub(r"^\d+/\d+ nodes are available: ", "", first.strip()).rstrip(". ")
    causes = {re.sub(r"^\d+ ", "", part) for part in re.split(r", (?=\d+ )", first)}
    return ", ".join(sorted(causes))


def _volumes(text: str, process: Process | None) -> Cause | None:
    if match := _NO_CLAIM.search(text):
        return Cause(
            "ClaimNotFound",
            f"there is no PersistentVolumeClaim {match[1]} in this namespace: create it, or correct its name in "
            "spec.model",
        )
    if any(words in text for words in _ELSEWHERE):
        remedy = "free or add what it needs there, or delete the claim and the loader's Job: the volume is made again"
        message = f"only nodes that cannot take the pod can mount the model's volume ({quote(text)}): {remedy}"
        return Cause("VolumeOnOtherNode", message)
    if _VOLUME.search(text):
        return Cause("VolumePending", f"a volume is missing ({quote(text)}): see kubectl describe pvc")
    return None


def volume_message(claim: str, storage_class: str | None) -> str:
    """Return the message of an unbound claim. The cause lies with the storage class; `kubectl describe pvc` shows
    it.
    """
    where = f"StorageClass {storage_class}" if storage_class else "the cluster's default StorageClass"
    return (
        f"the claim {claim} has no volume: check that {where} exists and has a provisioner or a free volume "
        f"(kubectl describe pvc {claim})"
    )


def _gpus(text: str, process: Process | None) -> Cause | None:
    if f"Insufficient {GPU}" in text:
        wanted = f"{process.gpus} " if process else ""
        return Cause(
            "InsufficientGPU",  # `observation.INSUFFICIENT_GPU`
            f"no node has {wanted}free {GPU}: free or add GPUs, or lower spec.resources.gpus "
            f"(the scheduler says: {quote(text)})",
        )
    if process and process.gpu_product and "node affinity/selector" in text:
        return Cause(
            "GPUProductNotFound",
            f"no node that could take the pod has the label nvidia.com/gpu.product={process.gpu_product}: correct "
            f"spec.resources.gpuProduct or add such a node (the scheduler says: {quote(text)})",
        )
    return None


def _amounts(text: str, process: Process | None) -> Cause | None:
    short = _INSUFFICIENT.findall(text)
    if not short:
        return None
    reasons = {"memory": "InsufficientMemory", "cpu": "InsufficientCPU"}
    resource = next((name for name in reasons if name in short), short[0])
    where = f"spec.resources.{resource}" if resource in reasons else "what spec.template asks for"
    return Cause(
        reasons.get(resource, "InsufficientResource"),
        f"no node has enough free {resource}: lower {where}, or free or add nodes (the scheduler says: {quote(text)})",
    )


def _nodes(text: str, process: Process | None) -> Cause | None:
    for words, reason, remedy in _NODE_CAUSES:
        if words in text:
            return Cause(reason, f"{remedy} (the scheduler says: {quote(text)})")
    return None


_NODE_CAUSES = (
    (
        "node affinity/selector",
        "NoMatchingNode",
        "no node has the labels that spec.template asks for: correct its nodeSelector or affinity, or label a node",
    ),
    (
        "taint",
        "NodesTainted",
        "the nodes are tainted: add tolerations to spec.template.spec, or remove the taints",
    ),
    ("Too many pods", "TooManyPods", "the nodes run as many pods as they allow: add nodes"),
    ("were unschedulable", "NodesCordoned", "the nodes are cordoned: kubectl uncordon, or add nodes"),
    ("no nodes available", "NoNodes", "the cluster has no nodes: add one"),
)

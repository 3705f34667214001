"""Annotations of running pods: which to remove first (`controller.kubernetes.io/pod-deletion-cost`), and which list of
adapters was written last. Pure functions.

Kubernetes removes pods that are not ready first, sleeping ones among them, and then pods of the lowest cost. The cost
is -1 for the emptiest pods, and for sleeping pods so that they go before pods that start.
It is written only when replicas are about to be removed, which keeps the writes few. It is a hint: where a pod's load
is unknown, Kubernetes chooses. `writes` writes the annotations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from pagemill_operator.backends.kubernetes.ownership import component_of, is_ending, is_ready
from pagemill_operator.backends.kubernetes.render.names import ADAPTERS_ANNOTATION, ENGINE, TEMPLATE_ANNOTATION
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.load.store import emptiest_first
from pagemill_protocol.report.load import EngineReport

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
REMOVED_FIRST = "-1"


class PodNote(NamedTuple):
    """The value that an annotation of a pod must get; None removes the annotation."""

    pod: Manifest
    annotation: str
    value: str | None


def costs_to_write(
    pods: Collection[Manifest],
    held: Mapping[str, EngineReport],
    replicas: int,
    template: str | None,
    asleep: Collection[str] = (),
) -> Iterator[PodNote]:
    """Yield the annotations to write so that the emptiest pods go when `replicas` are left.

    `held` is each engine's load by pod uid. Pods of another `template` are ignored: a rollout replaces them anyway.
    `asleep` holds the uids of sleeping pods.
    """
    live = [pod for pod in pods if _is_live(pod) and _annotations(pod).get(TEMPLATE_ANNOTATION) == template]
    ready = [pod for pod in live if is_ready(pod) and _uid(pod) not in asleep]
    resting = [pod for pod in live if _uid(pod) in asleep]
    if len(live) > replicas and len(ready) + len(resting) < len(live):
        for pod in resting:
            if COST_ANNOTATION not in _annotations(pod):
                yield PodNote(pod, COST_ANNOTATION, REMOVED_FIRST)
    num_going = len(ready) - replicas
    # If all pods go, or only pods that are not ready, there is nothing to choose.
    if not held or replicas <= 0 or num_going <= 0:
        return
    youngest_first = sorted(ready, key=_created, reverse=True)
    going = {pod["metadata"]["uid"] for pod in emptiest_first(youngest_first, _uid, held)[:num_going]}
    for pod in ready:
        wanted = REMOVED_FIRST if _uid(pod) in going else None
        # A value that another writer has set is kept.
        if (
            _annotations(pod).get(COST_ANNOTATION) in (None, REMOVED_FIRST)
            and _annotations(pod).get(COST_ANNOTATION) != wanted
        ):
            yield PodNote(pod, COST_ANNOTATION, wanted)


def renewing_notes(pods: Collection[Manifest], digest: str) -> Iterator[PodNote]:
    """Yield the annotations by which kubelets renew the list of adapters, whose digest is given, in running pods."""
    for pod in pods:
        if _is_live(pod) and _annotations(pod).get(ADAPTERS_ANNOTATION) != digest:
            yield PodNote(pod, ADAPTERS_ANNOTATION, digest)


def _is_live(pod: Manifest) -> bool:
    if is_ending(pod) or component_of(pod) != ENGINE:
        return False
    return pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def _created(pod: Manifest) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]


def _annotations(pod: Manifest) -> Mapping[str, str]:
    return pod["metadata"].get("annotations") or {}

"""Which pods go when replicas are removed: the emptiest, by `controller.kubernetes.io/pod-deletion-cost`. Pure.

Kubernetes removes pods that are not ready first, those that sleep among them, then those of the lowest cost; ours are 0
but for those that shall go: a pod that sleeps before one that starts.
The cost is written when replicas are about to be removed and at no other time: its writes are few. It is a hint, and
what is not known is left to Kubernetes. Neighbour: `backend`, which writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from pagemill_operator.backends.kubernetes.ownership import is_ending
from pagemill_operator.backends.kubernetes.render.names import ENGINE, TEMPLATE_ANNOTATION
from pagemill_operator.backends.kubernetes.snapshot import COMPONENT_LABEL, Manifest
from pagemill_operator.load.store import emptiest_first
from pagemill_protocol.load import EngineHeld

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
GOES = "-1"


class Cost(NamedTuple):
    """What a pod's annotation is to be; None: without."""

    pod: Manifest
    value: str | None


def costs_to_write(
    pods: Collection[Manifest],
    held: Mapping[str, EngineHeld],
    replicas: int,
    template: str | None,
    asleep: Collection[str] = (),
) -> Iterator[Cost]:
    """What must be written so that the emptiest go when so many `replicas` are left.

    `held`: by uid. `template`: pods of another one are replaced in any case. `asleep`: uids of those that sleep.
    """
    live = [pod for pod in pods if _is_live(pod) and _annotations(pod).get(TEMPLATE_ANNOTATION) == template]
    ready = [pod for pod in live if _is_ready(pod) and _uid(pod) not in asleep]
    resting = [pod for pod in live if _uid(pod) in asleep]
    if len(live) > replicas and len(ready) + len(resting) < len(live):
        yield from (Cost(pod, GOES) for pod in resting if COST_ANNOTATION not in _annotations(pod))
    num_going = len(ready) - replicas
    # Where all go, or only pods that are not ready, nothing is left to choose.
    if not held or replicas <= 0 or num_going <= 0:
        return
    youngest_first = sorted(ready, key=_created, reverse=True)
    going = {pod["metadata"]["uid"] for pod in emptiest_first(youngest_first, _uid, held)[:num_going]}
    for pod in ready:
        wanted = GOES if _uid(pod) in going else None
        # What another writer has set is kept.
        if _annotations(pod).get(COST_ANNOTATION) in (None, GOES) and _annotations(pod).get(COST_ANNOTATION) != wanted:
            yield Cost(pod, wanted)


def _is_live(pod: Manifest) -> bool:
    if is_ending(pod) or pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) != ENGINE:
        return False
    return pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def _created(pod: Manifest) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]


def _annotations(pod: Manifest) -> Mapping[str, str]:
    return pod["metadata"].get("annotations") or {}

"""Deployments whose replicas are groups of two pods, and the pods of these groups."""

from __future__ import annotations

from typing import Any

from support.deployments import Deployed
from support.objects import Document, llmdeployment
from support.waiting import until

WORKERS = "app.kubernetes.io/component=worker"
COMPLETE_S = 180.0


def of_two_pods(replicas: int, **engine: Any) -> Document:
    """Return a deployment of groups. `engine`: how pods of a group divide the model, by default `tensorParallel`."""
    return llmdeployment("chat", replicas=replicas, engine={**(engine or {"tensorParallel": 2}), "podsPerReplica": 2})


def workers(chat: Deployed) -> list[Document]:
    """Return the pods that only compute and are not being deleted, in the order of their groups."""
    pods = chat.kubectl.items("pods", "--selector", f"{chat.selector},{WORKERS}")
    live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return sorted(live, key=lambda pod: str(pod["metadata"]["name"]))


def leaders(chat: Deployed) -> list[Document]:
    """Return the first pods that are not being deleted, in the order of their groups."""
    return sorted(chat.pods(), key=lambda pod: str(pod["metadata"]["name"]))


def wait_replaced(chat: Deployed, replicas: int, *pods: Document) -> None:
    """Wait until these pods are gone, and until so many groups are complete and ready without them."""
    gone = {pod["metadata"]["uid"] for pod in pods}

    def present() -> tuple[list[Document], list[Document]]:
        return leaders(chat), workers(chat)

    def is_complete() -> bool:
        found = present()
        uids = {pod["metadata"]["uid"] for each in found for pod in each}
        return [len(each) for each in found] == [replicas, replicas] and gone.isdisjoint(uids)

    until(f"{replicas} groups are complete", is_complete, timeout_s=COMPLETE_S)
    chat.wait_ready(replicas)

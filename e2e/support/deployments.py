"""Helpers for LLMDeployments on a cluster: apply one, wait for it, change it, read what it owns."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from support.kubectl import Kubectl
from support.objects import MANAGED, Document
from support.waiting import until

READY_TIMEOUT_S = 240.0
CHILDREN = (
    "deployments.apps,replicasets.apps,pods,services,endpointslices.discovery.k8s.io,configmaps,secrets,"
    "persistentvolumeclaims,jobs.batch,poddisruptionbudgets.policy,networkpolicies.networking.k8s.io"
)
"""Every kind that the operator or its children's controllers create for an LLMDeployment."""


@dataclass(frozen=True)
class Deployed:
    """One LLMDeployment on the cluster."""

    kubectl: Kubectl
    name: str

    @property
    def target(self) -> str:
        return f"llmd/{self.name}"

    @property
    def selector(self) -> str:
        return f"pagemill.dev/deployment={self.name}"

    @property
    def pod_selector(self) -> str:
        return f"{self.selector},app.kubernetes.io/component=engine"

    def get(self) -> Document:
        found: Document = self.kubectl.json("get", self.target)
        return found

    def status(self) -> Document:
        found: Document = self.get().get("status", {})
        return found

    def condition(self, kind: str) -> Document:
        """Return the condition of that type, or an empty one."""
        conditions = self.status().get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def pods(self) -> list[Document]:
        """Return the engine pods that are not being deleted."""
        found = self.kubectl.items("pods", "--selector", self.pod_selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def wait_ready(self, replicas: int | None = None, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until condition Ready is true for the current spec, and until `replicas` are ready if it is given."""
        generation = self.get()["metadata"]["generation"]
        deadline = time.monotonic() + timeout_s
        self.kubectl.wait(self.target, f"jsonpath={{.status.observedGeneration}}={generation}", timeout_s)
        self.kubectl.wait(self.target, "condition=Ready", max(deadline - time.monotonic(), 1))
        if replicas is not None:
            left_s = max(deadline - time.monotonic(), 1)
            self.kubectl.wait(self.target, f"jsonpath={{.status.readyReplicas}}={replicas}", left_s)

    def wait_reason(self, kind: str, reason: str, timeout_s: float = 60) -> Document:
        """Wait until the condition has the reason; return the condition."""
        return (
            until(
                f"{self.target}: condition {kind} has reason {reason}",
                lambda: found if (found := self.condition(kind)).get("reason") == reason else None,
                timeout_s=timeout_s,
            )
            or {}
        )

    def patch(self, **spec: Any) -> None:
        """Merge fields into the spec, as a user's edit does."""
        self.kubectl.ok("patch", self.target, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def scale(self, replicas: int) -> None:
        self.kubectl.ok("scale", self.target, f"--replicas={replicas}")

    def wait_rolled_out(self, old_pods: list[Document], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until no pod of `old` is left and the new ones are Ready."""
        for pod in old_pods:
            self.kubectl.wait(f"pod/{pod['metadata']['name']}", "delete", timeout_s)
        self.wait_ready(timeout_s=timeout_s)

    def wait_settled(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the current spec is Ready and no pod of another template is left."""
        self.wait_ready(timeout_s=timeout_s)
        arguments = ["rollout", "status", f"deployment/{self.name}-engine", f"--timeout={timeout_s:.0f}s"]
        self.kubectl.ok(*arguments, timeout_s=timeout_s + 30)
        self.wait_ready(timeout_s=timeout_s)

    def delete(self, timeout_s: float = 120) -> None:
        """Delete the deployment and wait until no object that it owned is left."""
        self.kubectl.delete(self.target, timeout_s=timeout_s)
        wait_no_children(self.kubectl, self.selector, timeout_s)


def deploy(kubectl: Kubectl, document: Document) -> Deployed:
    """Apply an LLMDeployment into the namespace of `kubectl`."""
    kubectl.apply(document)
    return Deployed(kubectl, document["metadata"]["name"])


def wait_no_children(kubectl: Kubectl, selector: str = MANAGED, timeout_s: float = 120) -> None:
    """Wait until owner references have deleted everything that the operator created in the namespace."""

    def nothing_left() -> bool:
        return kubectl.ok("get", CHILDREN, "--selector", selector, "-o", "name") == ""

    try:
        until(f"nothing is left of {selector}", nothing_left, timeout_s=timeout_s, interval_s=0.5)
    except AssertionError as error:
        left = kubectl.ok("get", CHILDREN, "--selector", selector, "-o", "name")
        raise AssertionError(f"{error}: {left}") from None

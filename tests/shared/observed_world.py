"""Objects of a real cluster for one deployment, written by hand, as input of `observe`.

Statuses and messages are those of Kubernetes 1.36 with containerd 2.4, shortened.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.observe import observe
from pagemill_operator.backends.kubernetes.render import render_children
from pagemill_operator.backends.kubernetes.slim import slim
from pagemill_operator.backends.kubernetes.snapshot import ApplyError, Manifest, Owner, RenderContext, Snapshot
from pagemill_operator.plan import Plan, Problem, make_plan
from pagemill_operator.status.conditions import Finding, find_conditions
from pagemill_operator.status.observation import Observation

CONDITION_TYPES = (
    "Planned",
    "Scheduled",
    "ModelLoaded",
    "Serving",
    "ScalingActive",
    "SLOMet",
    "FieldsSupported",
    "Ready",
)
"""The conditions that every status has, in this order."""
READY = ({"type": "Ready", "status": "True"},)
PULL = 'failed to pull and unpack image "docker.io/x:1": failed to resolve image: docker.io/x:1: not found'
CACHED = {"model__source": "hf://org/name", "model__cache": {"size": "1Gi", "storageClassName": "fast"}}


class World:
    """The objects of a cluster for one deployment; a case adds its pods."""

    def __init__(self, deployment: LLMDeployment) -> None:
        self.plan: Plan = make_plan(deployment, "kubernetes")
        self.generation = deployment.metadata.generation
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.pods: list[Manifest] = []
        self.errors: list[ApplyError] = []
        self.status: dict[str, Any] = {}
        self.num_gateways = self.num_gateways_ready = 1
        self.conflict: Problem | None = None
        self.progress = ""

    def apply(self, *, loader_done: bool = False) -> World:
        context = RenderContext(namespace="pagemill-system", engine_image="pagemill/engine:1", loader_done=loader_done)
        for manifest in render_children(self.plan, Owner("default", "chat", "uid"), context):
            kept = slim(manifest["kind"], manifest)
            kept["metadata"]["uid"] = f"{manifest['kind']}-{manifest['metadata']['name']}"
            self.objects[manifest["kind"], manifest["metadata"]["name"]] = kept
        return self

    def pod(
        self,
        status: dict[str, Any] | None = None,
        *,
        node: str = "node-1",
        conditions: tuple[dict[str, Any], ...] = (),
        component: str = "engine",
        template: Manifest | None = None,
        **metadata: Any,
    ) -> World:
        """Add a pod with the `status` of its main container, from `template` (by default the newest Deployment)."""
        kind = "Deployment" if component == "engine" else "Job"
        owner = next(child for (child_kind, _), child in self.objects.items() if child_kind == kind)
        made_from = template or owner["spec"]["template"]
        name = f"{owner['metadata']['name']}-{len(self.pods)}"
        statuses = [{"name": component, "image": "pagemill/engine:1", **status}] if status else []
        pod = {
            "metadata": {
                **made_from["metadata"],
                "name": name,
                "namespace": "default",
                "ownerReferences": [{"controller": True, "kind": kind, "uid": owner["metadata"]["uid"]}],
                **metadata,
            },
            "spec": {**made_from["spec"], **({"nodeName": node} if node else {})},
            "status": {"phase": "Pending", "conditions": list(conditions), "containerStatuses": statuses},
        }
        self.pods.append(slim("Pod", pod))
        return self

    def condition(self, kind: str, name: str, **condition: str) -> World:
        self.objects[kind, name].setdefault("status", {}).setdefault("conditions", []).append(condition)
        return self

    @property
    def snapshot(self) -> Snapshot:
        metadata = {"name": "chat", "namespace": "default", "generation": self.generation, "uid": "uid"}
        return Snapshot(
            owner={"metadata": metadata, "status": self.status},
            children=self.objects,
            pods=tuple(self.pods),
            num_gateways=self.num_gateways,
            num_gateways_ready=self.num_gateways_ready,
            conflict=self.conflict,
            apply_errors=tuple(self.errors),
            progress=self.progress,
        )

    def findings(self) -> dict[str, Finding]:
        return {finding.type: finding for finding in find_conditions(observe(self.snapshot, self.plan))}

    def at(self, seconds: float) -> tuple[Observation, dict[str, Finding]]:
        """Return the observation this number of seconds after the start of the year."""
        now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
        seen = observe(self.snapshot, self.plan, now)
        return seen, {finding.type: finding for finding in find_conditions(seen)}


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"node": "", "conditions": (condition,)}


def waiting(reason: str, message: str = "", last: dict[str, Any] | None = None) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"ready": False, "started": False, "state": state, "lastState": {"terminated": last} if last else {}}


def running(*, started: bool, ready: bool = False, last: dict[str, Any] | None = None) -> dict[str, Any]:
    state = {"running": {"startedAt": "2026-01-01T00:00:10Z"}}
    return {"ready": ready, "started": started, "state": state, "lastState": {"terminated": last} if last else {}}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"exitCode": code, "reason": reason, "message": message}


def reported(reason: str, message: str) -> dict[str, Any]:
    return ended(1, message=json.dumps({"reason": reason, "message": message}))

"""`/scale`, `/status` and server-side apply work as controllers and autoscalers use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Create = Callable[[dict[str, Any]], dict[str, Any]]


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    when = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": when}


def test_kubectl_scale_sets_the_replicas(kubectl: Any, create: Create, deployment: Any) -> None:
    name = create(deployment(replicas=1))["metadata"]["name"]
    kubectl.ok("scale", f"llmd/{name}", "--replicas=3")
    assert kubectl.json("get", "llmd", name)["spec"]["replicas"] == 3


def test_scale_reports_replicas_and_the_selector(kubectl: Any, create: Create, deployment: Any) -> None:
    """HorizontalPodAutoscaler and KEDA read these fields."""
    stored = create(deployment(replicas=2))
    name = stored["metadata"]["name"]
    stored["status"] = {"replicas": 2, "selector": f"pagemill.dev/deployment={name}"}
    kubectl.ok("replace", "--subresource=status", "-f", "-", stdin=stored)
    scale = json.loads(kubectl.ok("get", "--raw", f"{PATH}/{name}/scale"))
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 2, "selector": f"pagemill.dev/deployment={name}"}


PATH = "/apis/pagemill.dev/v1beta1/namespaces/default/llmdeployments"


def test_scale_respects_the_limits_of_replicas(kubectl: Any, create: Create, deployment: Any) -> None:
    name = create(deployment())["metadata"]["name"]
    done = kubectl.run("scale", f"llmd/{name}", "--replicas=1001")
    assert done.returncode == 1
    assert "spec.replicas" in done.stderr


def test_writes_of_status_and_spec_do_not_affect_each_other(kubectl: Any, create: Create, deployment: Any) -> None:
    stored = create(deployment(replicas=1))
    name, generation = stored["metadata"]["name"], stored["metadata"]["generation"]
    assert "status" not in stored
    kubectl.ok("patch", "llmd", name, "--subresource=status", "--type=merge", "-p", '{"status":{"readyReplicas":1}}')
    assert kubectl.json("get", "llmd", name)["metadata"]["generation"] == generation
    kubectl.ok("patch", "llmd", name, "--type=merge", "-p", '{"spec":{"replicas":2},"status":{"readyReplicas":9}}')
    after = kubectl.json("get", "llmd", name)
    assert after["metadata"]["generation"] == generation + 1
    assert after["status"]["readyReplicas"] == 1


def test_conditions_of_two_field_managers_are_merged(kubectl: Any, create: Create, deployment: Any) -> None:
    """Conditions are a list-map: each field manager owns its types and does not change the others."""
    stored = create(deployment())
    name = stored["metadata"]["name"]
    apply_status(kubectl, stored, "operator", [condition("Ready", "False", "ModelLoading")])
    apply_status(kubectl, stored, "autoscaler", [condition("ScalingActive", "True", "Active")])
    apply_status(kubectl, stored, "operator", [condition("Ready", "True", "Serving")])
    conditions = kubectl.json("get", "llmd", name)["status"]["conditions"]
    assert {each["type"]: each["reason"] for each in conditions} == {"Ready": "Serving", "ScalingActive": "Active"}
    apply_status(kubectl, stored, "autoscaler", [])
    conditions = kubectl.json("get", "llmd", name)["status"]["conditions"]
    assert [each["type"] for each in conditions] == ["Ready"]


def apply_status(kubectl: Any, stored: dict[str, Any], manager: str, conditions: list[dict[str, Any]]) -> None:
    wanted = {key: stored[key] for key in ("apiVersion", "kind")}
    wanted |= {"metadata": {"name": stored["metadata"]["name"]}, "status": {"conditions": conditions}}
    arguments = ("apply", "--server-side", "--subresource=status", f"--field-manager={manager}", "-f", "-")
    kubectl.ok(*arguments, stdin=wanted)


def test_a_condition_without_a_reason_is_refused(kubectl: Any, create: Create, deployment: Any) -> None:
    name = create(deployment())["metadata"]["name"]
    patch = json.dumps({"status": {"conditions": [condition("Ready", "False", "")]}})
    done = kubectl.run("patch", "llmd", name, "--subresource=status", "--type=merge", "-p", patch)
    assert "status.conditions[0].reason" in done.stderr


def test_null_means_absent(create: Create, deployment: Any) -> None:
    stored = create(deployment(autoscaling=None, cost=None))
    assert "autoscaling" not in stored["spec"]
    assert "cost" not in stored["spec"]

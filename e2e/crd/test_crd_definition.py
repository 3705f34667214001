"""A real API server accepts the CRD without warnings, and kubectl lists, explains and prints its objects."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

RESOURCE = "llmdeployments.pagemill.dev"


def test_the_definition_applies_without_a_warning(applied: subprocess.CompletedProcess[str]) -> None:
    assert applied.stderr == ""


def test_the_definition_is_established_and_its_schema_is_structural(kubectl: Any, applied: object) -> None:
    status = kubectl.json("get", "crd", RESOURCE)["status"]
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert conditions["Established"] == ("True", "InitialNamesAccepted")
    assert conditions["NamesAccepted"] == ("True", "NoConflicts")
    assert "NonStructuralSchema" not in conditions
    assert status["storedVersions"] == ["v1beta1"]


def test_applying_the_definition_again_changes_nothing(kubectl: Any, applied: object) -> None:
    before = kubectl.json("get", "crd", RESOURCE)["metadata"]["generation"]
    kubectl.ok("apply", "--server-side", "-f", "crds/llmdeployments.yaml")
    assert kubectl.json("get", "crd", RESOURCE)["metadata"]["generation"] == before


def test_the_definition_has_a_short_name_and_a_category(
    kubectl: Any, create: Callable[..., Any], deployment: Any
) -> None:
    name = create(deployment())["metadata"]["name"]
    for word in ("llmd", "llmdeployment", "llmdeployments", "pagemill"):
        assert f"llmdeployment.pagemill.dev/{name}" in kubectl.ok("get", word, "-o", "name").split()


def test_get_prints_the_columns_of_the_definition(kubectl: Any, create: Callable[..., Any], deployment: Any) -> None:
    stored = create(deployment())
    stored["status"] = {
        "readyReplicas": 2,
        "desiredReplicas": 3,
        "plan": {"modelName": "smollm2"},
        "load": {"kvCacheUsagePercent": 40, "requestsWaiting": 5},
        "conditions": [ready("False", "ModelLoading")],
    }
    kubectl.ok("replace", "--subresource=status", "-f", "-", stdin=stored)
    header, row = kubectl.ok("get", "llmd", stored["metadata"]["name"]).splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "DESIRED", "KV%", "QUEUE", "REASON", "AGE"]
    assert row.split()[1:7] == ["smollm2", "2", "3", "40", "5", "ModelLoading"]
    wide, *_ = kubectl.ok("get", "llmd", stored["metadata"]["name"], "-o", "wide").splitlines()
    assert wide.split()[-2:] == ["VERSION", "URL"]


def test_explain_describes_every_section(kubectl: Any, applied: object) -> None:
    text = kubectl.ok("explain", "llmd.spec")
    for section in (
        "model",
        "engine",
        "resources",
        "replicas",
        "autoscaling",
        "routing",
        "rollout",
        "template",
        "cost",
    ):
        assert f"\n  {section}\t" in text, section
    field = kubectl.ok("explain", "llmd.spec.engine.maxModelLen")
    assert "<integer>" in field
    assert "prompt and output together" in field


def ready(status: str, reason: str) -> dict[str, Any]:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }

"""The HorizontalPodAutoscaler of examples/external-scaling for a case's deployment, its conditions and its events."""

from __future__ import annotations

from typing import Any

import yaml
from support.kubectl import Kubectl
from support.metrics_api import EXAMPLES
from support.objects import Document


def autoscaler(name: str, *, lowest: int, highest: int) -> Document:
    """Return an autoscaler of the LLMDeployment of that name, whose model has the same name."""
    documents = yaml.safe_load_all((EXAMPLES / "hpa.yaml").read_text())
    found: Document = next(each for each in documents if each["kind"] == "HorizontalPodAutoscaler")
    found["metadata"]["name"] = found["spec"]["scaleTargetRef"]["name"] = name
    for metric in found["spec"]["metrics"]:
        selector = metric["external"]["metric"]["selector"]["matchLabels"]
        selector.update(dict.fromkeys(selector, name))
    found["spec"].update(minReplicas=lowest, maxReplicas=highest)
    return found


def condition(kubectl: Kubectl, name: str, kind: str) -> dict[str, Any]:
    """Return the condition of that type, or an empty one."""
    conditions: list[dict[str, Any]] = kubectl.json("get", f"hpa/{name}").get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def current(kubectl: Kubectl, name: str) -> dict[str, str]:
    """Return the current value of each metric per replica, as the autoscaler's status shows it."""
    metrics = kubectl.json("get", f"hpa/{name}").get("status", {}).get("currentMetrics") or []
    seen = [each["external"] for each in metrics if "external" in each]
    return {each["metric"]["name"]: each["current"]["averageValue"] for each in seen}


def rescales(kubectl: Kubectl, name: str) -> list[str]:
    """Return the autoscaler's messages about each new size, oldest first."""
    selector = f"involvedObject.kind=HorizontalPodAutoscaler,involvedObject.name={name},reason=SuccessfulRescale"
    events = kubectl.items("events", f"--field-selector={selector}")
    return [each["message"] for each in sorted(events, key=lambda each: str(each["firstTimestamp"]))]

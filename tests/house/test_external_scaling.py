"""The examples for HPA and KEDA are valid objects for their deployment and use metrics that are exported.

The official client's models check HorizontalPodAutoscaler and refuse unknown fields. The part of KEDA's definition that
the example uses is written down here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.render.names import ENGINE
from pagemill_operator.backends.kubernetes.snapshot import COMPONENT_LABEL, OWNER_LABEL
from pagemill_protocol import metrics as specs

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "external-scaling"
HPA, KEDA, ADAPTER, SCRAPES = "hpa.yaml", "keda.yaml", "prometheus-adapter.yaml", "prometheus.yaml"
TARGET_LABELS = {"namespace", OWNER_LABEL.replace(".", "_").replace("/", "_")}
"""Labels that a PodMonitor or the configuration of Prometheus adds to every series of an engine."""
SCALED_OBJECT: dict[str, Any] = {
    "scaleTargetRef": {"apiVersion": str, "kind": str, "name": str},
    "minReplicaCount": int,
    "maxReplicaCount": int,
    "pollingInterval": int,
    "triggers": [
        {
            "type": str,
            "metricType": str,
            "metadata": {"serverAddress": str, "query": str, "threshold": str, "ignoreNullValues": str},
        }
    ],
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document.get("kind") == kind]
    return found


def exported() -> dict[str, set[str]]:
    """Return the labels of each metric."""
    known = [value for value in vars(specs).values() if isinstance(value, specs.MetricSpec)]
    return {spec.exported_name: set(spec.labels) for spec in known}


def faults(value: Any, shape: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which a value differs from its shape."""
    if isinstance(shape, dict):
        for key in value.keys() ^ shape.keys():
            yield f"{path}.{key}"
        for key in value.keys() & shape.keys():
            yield from faults(value[key], shape[key], f"{path}.{key}")
    elif isinstance(shape, list):
        for item in value:
            yield from faults(item, shape[0], path)
    elif not isinstance(value, shape):
        yield f"{path}: {value!r}"


def test_the_folder_contains_these_examples() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {HPA, KEDA, ADAPTER, SCRAPES}


def test_the_autoscaler_is_valid_for_the_api() -> None:
    autoscaler = of_kind(HPA, "HorizontalPodAutoscaler")
    assert autoscaler["apiVersion"] == "autoscaling/v2"
    client.V2HorizontalPodAutoscaler.model_validate(autoscaler)
    for metric in autoscaler["spec"]["metrics"]:
        assert metric["type"] == "External"
        assert metric["external"]["target"]["type"] == "AverageValue"


def test_the_scaled_object_is_valid_for_keda() -> None:
    scaled = of_kind(KEDA, "ScaledObject")
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert list(faults(scaled["spec"], SCALED_OBJECT)) == []


@pytest.mark.parametrize(
    ("name", "kind", "lowest", "highest"),
    [
        (HPA, "HorizontalPodAutoscaler", "minReplicas", "maxReplicas"),
        (KEDA, "ScaledObject", "minReplicaCount", "maxReplicaCount"),
    ],
)
def test_the_examples_scale_their_deployment(name: str, kind: str, lowest: str, highest: str) -> None:
    deployment = LLMDeployment.model_validate(of_kind(name, "LLMDeployment"))
    spec = of_kind(name, kind)["spec"]
    target = {"apiVersion": deployment.api_version, "kind": deployment.kind, "name": deployment.metadata.name}
    assert spec["scaleTargetRef"] == target
    scaling = deployment.spec.autoscaling
    assert scaling is not None
    assert scaling.mode == "External"
    assert (spec[lowest], spec[highest]) == (scaling.min_replicas, scaling.max_replicas)


def test_the_adapter_serves_every_metric_of_the_autoscaler() -> None:
    rules = {rule["name"]["as"]: rule for rule in documents(ADAPTER)[0]["rules"]["external"]}
    known = exported()
    asked = {
        each["external"]["metric"]["name"]: set(each["external"]["metric"]["selector"]["matchLabels"])
        for each in of_kind(HPA, "HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    assert asked.keys() == rules.keys()
    for name, rule in rules.items():
        (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        assert re.fullmatch(rule["name"]["matches"], series)
        assert asked[name] <= known[series] | TARGET_LABELS, name
        assert "<<.Series>>{<<.LabelMatchers>>}" in rule["metricsQuery"]


def test_queries_use_exported_metrics() -> None:
    known = exported()
    queries = [each["metadata"]["query"] for each in of_kind(KEDA, "ScaledObject")["spec"]["triggers"]]
    found = [match for query in queries for match in re.findall(r"sum\(([\w:]+)\{([^}]*)\}\)", query)]
    assert len(found) == 3
    for series, matchers in found:
        labels = set(re.findall(r'(\w+)="', matchers))
        assert labels
        assert labels <= known[series] | TARGET_LABELS, series


def test_prometheus_adds_the_labels_that_the_rules_select() -> None:
    engines, gateways = documents(SCRAPES)[0]["scrape_configs"]
    (pods,) = engines["kubernetes_sd_configs"]
    assert pods["selectors"] == [{"role": "pod", "label": f"{OWNER_LABEL},{COMPONENT_LABEL}={ENGINE}"}]
    added = {each["target_label"] for each in engines["relabel_configs"] if "target_label" in each}
    assert added == TARGET_LABELS | {"pod"}
    control = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": "control", "action": "keep"}
    for job in (engines, gateways):
        assert control in job["relabel_configs"]

"""Values that cannot work are refused before the installation, with the field and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

helm = pytest.importorskip("helm_python", reason="the package helm-python-sdk exists for Linux on x86-64")

Render = Callable[..., Any]


def test_the_error_for_an_install_without_keys_names_both_remedies(render: Render) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render({})
    for remedy in ("gateway.apiKeys.existingSecret=pagemill-api-keys", "gateway.auth.allowAnonymous=true"):
        assert remedy in str(refused.value)
    assert "kubectl --namespace pagemill-system create secret" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"apiKeys": {"existingSecret": "keys"}}}, r"allowAnonymous: it is true"),
        ({"operator": {"leaderElection": {"renewDeadlineSeconds": 15}}}, r"renewDeadlineSeconds \(15\)"),
        ({"operator": {"leaderElection": {"retryPeriodSeconds": 12}}}, r"retryPeriodSeconds \(12\)"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 11}}}, r"minReplicas \(11\) is more than"),
        (
            {"gateway": {"autoscaling": {"enabled": True, "targetCPUUtilizationPercentage": 0}}},
            "without a metric",
        ),
        ({"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}}, "scraped twice"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "attach to nothing"),
        ({"global": {}}, r"image\.operator\.registry: it is empty, and no images are published yet"),
        (
            {"global": {}, "image": {"operator": {"registry": "r"}, "gateway": {"registry": "r"}}},
            r"image\.engine\.registry: it is empty",
        ),
        ({"gateway": {"settings": {"control_token": "x"}}}, r"settings\.control_token: .* ConfigMap"),
        ({"gateway": {"settings": {"api_keys": ["0" * 64]}}}, r"settings\.api_keys: .* ConfigMap"),
    ],
)
def test_contradictory_values_are_refused(render: Render, anonymous: Any, values: Any, message: str) -> None:
    merged = {**anonymous, **values}
    merged["gateway"] = {**anonymous["gateway"], **values.get("gateway", {})}
    with pytest.raises(helm.HelmError, match=message):
        render(merged)


def test_a_secret_together_with_hashes_is_refused(render: Render) -> None:
    with pytest.raises(helm.HelmError, match="existingSecret and sha256 are both set"):
        render({"gateway": {"apiKeys": {"existingSecret": "keys", "sha256": ["0" * 64]}}})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"gateway": {"replicas": "3"}}, "replicas"),
        ({"gateway": {"replicas": -1}}, "replicas"),
        ({"gateway": {"service": {"type": "Cluster"}}}, "type"),
        ({"gateway": {"service": {"port": 70000}}}, "port"),
        ({"gateway": {"apiKeys": {"sha256": ["sk-plain-key"]}}}, "sha256"),
        ({"image": {"engine": {"tag": "latest"}}}, "tag"),
        ({"image": {"engine": {"digest": "1234"}}}, "digest"),
        ({"operator": {"logLevel": "verbose"}}, "logLevel"),
        ({"operator": {"keyRotationSeconds": 599}}, "keyRotationSeconds"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"commonLabels": {"a": 1}}, "commonLabels"),
        ({"commonLabels": {"app.kubernetes.io/managed-by": "us"}}, "commonLabels"),
        ({"gateway": {"podLabels": {"app.kubernetes.io/name": "other"}}}, "podLabels"),
        ({"operator": {"podLabels": {"app.kubernetes.io/component": "gateway"}}}, "podLabels"),
    ],
)
def test_the_schema_refuses_mistyped_values(render: Render, values: Any, field: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=field):
        render(values)


def test_parent_charts_may_have_their_own_globals(render: Render, anonymous: Any) -> None:
    assert render({**anonymous, "global": {**anonymous["global"], "storageClass": "fast"}}).objects

"""The definition of LoRAAdapter at a real API server: defaults, refusals, columns and the status subresource."""

from __future__ import annotations

import json
from typing import Any

import pytest

EXAMPLE: dict[str, Any] = {
    "apiVersion": "pagemill.dev/v1beta1",
    "kind": "LoRAAdapter",
    "metadata": {"name": "sql"},
    "spec": {"deployment": "qwen", "source": "s3://adapters/sql"},
}


@pytest.mark.usefixtures("applied")
def test_an_adapter_is_stored_shown_and_refused_by_field(kubectl: Any) -> None:
    kubectl.ok("apply", "--server-side", "-f", "-", stdin=EXAMPLE)
    assert kubectl.json("get", "lora", "sql")["spec"] == {**EXAMPLE["spec"], "pinned": False}
    status = {
        "name": "sql-of-qwen",
        "loadedReplicas": 1,
        "loaded": ["qwen-0"],
        "refused": [{"pod": "qwen-1", "reason": "AdapterTooLarge", "message": "rank 64"}],
        "conditions": [
            {"type": "Ready", "status": "False", "reason": "AdapterTooLarge", "message": "rank 64",
             "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
    }  # fmt: skip
    patch = json.dumps({"status": status})
    kubectl.ok("patch", "lora", "sql", "--subresource=status", "--type=merge", "-p", patch)
    header, row = kubectl.ok("get", "lora", "sql").splitlines()
    assert header.split() == ["NAME", "MODEL", "DEPLOYMENT", "LOADED", "REASON", "AGE"]
    assert row.split()[:5] == ["sql", "sql-of-qwen", "qwen", "1", "AdapterTooLarge"]
    assert kubectl.json("get", "lora", "sql")["status"]["refused"] == status["refused"]
    for field, value in {"source": "no source", "deployment": "Not_A_Name", "rank": 8}.items():
        wrong = {**EXAMPLE, "spec": {**EXAMPLE["spec"], field: value}}
        done = kubectl.run("apply", "--server-side", "--validate=strict", "-f", "-", stdin=wrong)
        assert done.returncode != 0, field
        assert field in done.stderr
    kubectl.ok("delete", "lora", "sql")


@pytest.mark.usefixtures("applied")
def test_a_deployments_status_lists_adapters_by_name(kubectl: Any, deployment: Any) -> None:
    made = deployment(
        engine={"lora": {}}, model={"source": "s3://m/q", "adapters": [{"name": "a", "source": "s3://a/b"}]}
    )
    kubectl.ok("apply", "--server-side", "-f", "-", stdin=made)
    name = made["metadata"]["name"]
    stored = kubectl.json("get", "llmd", name)["spec"]
    assert stored["engine"]["lora"] == {"maxLoras": 1, "maxLoraRank": 16}
    assert stored["model"]["adapters"] == [{"name": "a", "source": "s3://a/b", "pinned": False}]
    adapters = [{"name": "a", "source": "s3://a/b", "loadedReplicas": 1, "loaded": ["pod"]}]
    patch = json.dumps({"status": {"adapters": adapters}})
    kubectl.ok("patch", "llmd", name, "--subresource=status", "--type=merge", "-p", patch)
    (shown,) = kubectl.json("get", "llmd", name)["status"]["adapters"]
    assert shown.items() >= {"name": "a", "loaded": ["pod"]}.items()
    kubectl.ok("delete", "llmd", name)

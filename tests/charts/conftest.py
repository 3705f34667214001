"""Renders the chart with Helm's own code (a Python package) for every values file in `charts/pagemill/ci`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "pagemill"
VARIANTS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "pagemill", "pagemill-system"

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects of one rendered chart, including hooks."""

    objects: list[Object]
    notes: str
    name: str

    def all(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        found = [each for each in self.all(kind) if name in (None, each["metadata"]["name"])]
        assert len(found) == 1, f"{len(found)} objects {kind} {name or ''} in {self.name}"
        return found[0]

    def component(self, kind: str, component: str) -> Object:
        label = "app.kubernetes.io/component"
        (found,) = [each for each in self.all(kind) if each["metadata"].get("labels", {}).get(label) == component]
        return found

    def pod_specs(self) -> dict[str, Object]:
        sets = [*self.all("Deployment"), *self.all("StatefulSet")]
        specs = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in sets}
        return specs | {each["metadata"]["name"]: each["spec"] for each in self.all("Pod")}


Render = Callable[..., Rendered]


@cache
def _chart() -> Any:
    helm = pytest.importorskip("helm_python", reason="the package helm-python-sdk exists for Linux on x86-64")
    return helm.Chart.load(CHART)


def variant_values(name: str) -> Object:
    values: Object = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return values


def render_chart(values: Object, variant: str = "values", **options: Any) -> Rendered:
    """Check the values against the schema, then render; raise Helm's error if either fails."""
    chart = _chart()
    chart.validate_schema(values)
    texts = chart.render(values, **{"name": RELEASE, "namespace": NAMESPACE, **options})
    notes = next(text for path, text in texts.items() if path.endswith("NOTES.txt"))
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    objects = [each for text in manifests for each in yaml.safe_load_all(text) if each is not None]
    return Rendered(objects, notes, variant)


@cache
def _variant(name: str) -> Rendered:
    return render_chart(variant_values(name), name)


@pytest.fixture
def render() -> Render:
    return render_chart


@pytest.fixture
def chart_folder() -> Path:
    return CHART


@pytest.fixture(params=VARIANTS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """Return every variant in turn."""
    return _variant(request.param)


@pytest.fixture
def variant() -> Callable[[str], Rendered]:
    return _variant


@pytest.fixture
def anonymous() -> Object:
    """Return the minimal values of the chart."""
    return {"gateway": {"auth": {"allowAnonymous": True}}, "global": {"imageRegistry": "registry.example.com"}}

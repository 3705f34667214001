"""The dashboards pass the rules of Grafana's dashboard linter and use only recorded series that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from observability.panels import SELECTED
from observability.rules import recording_groups
from pagemill_protocol import metrics

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "charts" / "pagemill" / "files" / "dashboards").glob("*.json"))
DASHBOARDS = [json.loads(path.read_text("utf-8")) for path in FILES]
RECORDED = {rule.record for rules in recording_groups().values() for rule in rules}
UNITS = {"none", "s", "m", "ops", "reqps", "percentunit", "bytes"}
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")

Dashboard = dict[str, Any]


def panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets(dashboard: Dashboard) -> list[dict[str, Any]]:
    return [target for panel in panels(dashboard) for target in panel["targets"]]


@pytest.fixture(params=DASHBOARDS, ids=lambda dashboard: dashboard["uid"])
def dashboard(request: pytest.FixtureRequest) -> Dashboard:
    made: Dashboard = request.param
    return made


def test_there_are_five_dashboards_with_different_names() -> None:
    assert {each["title"].removeprefix("Pagemill / ") for each in DASHBOARDS} == {
        "Fleet capacity",
        "Model",
        "Autoscaling",
        "Gateway",
        "Operator",
    }
    assert [each["uid"] for each in DASHBOARDS] == [path.stem for path in FILES]


def test_the_data_source_is_a_variable_used_everywhere(dashboard: Dashboard) -> None:
    (source,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    queries = [each for each in dashboard["templating"]["list"] if each["type"] == "query"]
    users = [*queries, *panels(dashboard), *targets(dashboard)]
    assert {json.dumps(each["datasource"], sort_keys=True) for each in users} == {
        '{"type": "prometheus", "uid": "${datasource}"}'
    }


def test_job_instance_and_model_are_variables_of_several_values(dashboard: Dashboard) -> None:
    queries = {each["name"]: each for each in dashboard["templating"]["list"] if each["type"] == "query"}
    assert list(queries) == ["job", "instance", "model"]
    for each in queries.values():
        assert (each["multi"], each["includeAll"], each["allValue"]) == (True, True, ".+")
        assert each["label"]
        assert each["refresh"] == 2, "the variables must be refreshed with the time range"
        assert re.fullmatch(r"label_values\(.+, (job|instance|model|model_name)\)", each["query"])


def test_panels_have_a_title_a_description_a_unit_and_expressions(dashboard: Dashboard) -> None:
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"].endswith((".", "advises."))
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        assert all(target["expr"] and target["legendFormat"] is not None for target in panel["targets"])
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(titles) == len(set(titles))


def test_panels_have_unique_ids_and_do_not_overlap(dashboard: Dashboard) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} <= set(range(24))


def test_rates_use_the_rate_interval(dashboard: Dashboard) -> None:
    for target in targets(dashboard):
        assert re.findall(r"\[([^\]]*)\]", target["expr"]) == ["$__rate_interval"] * target["expr"].count("rate(")


def test_series_are_selected_by_the_variables(dashboard: Dashboard) -> None:
    """Recorded series are sums and have neither job nor instance."""
    for target in targets(dashboard):
        selectors = SELECTOR.findall(target["expr"])
        assert selectors
        for name, matchers in selectors:
            if ":pagemill_" in name:
                assert name in RECORDED
                assert matchers.startswith("tenant=" if name.startswith("tenant:") else 'model=~"$model"')
            else:
                assert matchers.startswith(SELECTED)


def test_dashboards_link_to_each_other_and_cannot_be_edited(dashboard: Dashboard) -> None:
    (link,) = dashboard["links"]
    assert (link["type"], link["tags"], link["keepTime"], link["includeVars"]) == (
        "dashboards",
        ["pagemill"],
        True,
        True,
    )
    assert "pagemill" in dashboard["tags"]
    assert dashboard["editable"] is False
    assert dashboard["description"]


def test_one_title_has_one_meaning() -> None:
    meanings: dict[str, set[tuple[str, ...]]] = {}
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            meanings.setdefault(panel["title"], set()).add(tuple(each["expr"] for each in panel["targets"]))
    assert [title for title, found in meanings.items() if len(found) > 1] == []


def test_series_of_engines_and_gateways_are_exported() -> None:
    known = [value for value in vars(metrics).values() if isinstance(value, metrics.MetricSpec)]
    names = {spec.exported_name for spec in known}
    names |= {f"{spec.name}_{end}" for spec in known if spec.kind == "histogram" for end in ("bucket", "sum", "count")}
    shown = {
        name
        for dashboard in DASHBOARDS
        for target in targets(dashboard)
        for name, _ in SELECTOR.findall(target["expr"])
        if name.startswith(("vllm:", "pagemill_engine_", "pagemill_gateway_"))
    }
    of_adapters = {"pagemill_engine_adapters", "pagemill_engine_adapter_loads_total"}
    assert of_adapters | {"pagemill_engine_adapter_evictions_total", "pagemill_gateway_adapter_requests_total"} <= shown
    assert shown - names == set()

"""The parts of dashboards: panels, selectors of series by the dashboard's variables, and the frame around them.

They are built with Grafana's own typed builders (`grafana-foundation-sdk`). `dashboards` lists the panels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "pagemill"
COLUMNS, HEIGHT = 24, 8
SELECTED = 'job=~"$job",instance=~"$instance"'

Target = tuple[str, str]
"""An expression, and the legend of its series."""


class Panel(NamedTuple):
    title: str
    description: str
    unit: str
    """Grafana's unit:
    https://github.com/grafana/grafana/blob/main/packages/grafana-data/src/valueFormats/categories.ts
    """
    targets: Sequence[Target]
    is_stat: bool = False
    """Whether to show only the latest values."""
    width: int = 8
    max: float | None = None


class Page(NamedTuple):
    """One dashboard."""

    uid: str
    title: str
    description: str
    scraped: str
    """The metric whose `job` and `instance` labels can be selected."""
    models: str
    """A query for the names of models."""
    rows: dict[str, list[Panel]]


def engine(name: str, *matchers: str) -> str:
    """Return a series of engines of the selected models."""
    return _series(name, SELECTED, 'model_name=~"$model"', *matchers)


def of_model(name: str, *matchers: str) -> str:
    """Return a series of gateways or the operator, of the selected models."""
    return _series(name, SELECTED, 'model=~"$model"', *matchers)


def process(name: str, *matchers: str) -> str:
    """Return a series of a process that does not belong to one model."""
    return _series(name, SELECTED, *matchers)


def recorded(name: str, *matchers: str) -> str:
    """Return a recorded series, which has no `job` and `instance` labels."""
    return _series(name, 'model=~"$model"', *matchers)


def _series(name: str, *matchers: str) -> str:
    return f"{name}{{{','.join(matchers)}}}"


def per_second(series: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({series}[$__rate_interval]))"


def or_zero(expression: str, scraped: str) -> str:
    """Return the expression, or 0 where nothing has happened yet although `scraped`, a series, is there."""
    return f"{expression} or on () 0 * max({scraped})"


def total(series: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({series})"


def quantiles(series: str, *by: str) -> list[Target]:
    """Return median, 95th and 99th percentile of a histogram; `series` ends in `_bucket`."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    rates = per_second(series, "le", *by)
    return [(f"histogram_quantile({q}, {rates})", f"{legend} p{q * 100:g}".strip()) for q in (0.5, 0.95, 0.99)]


def dashboard_json(page: Page) -> str:
    built = _frame(page)
    for title, panels in page.rows.items():
        built.with_row(dashboard.Row(title))
        for panel in panels:
            built.with_panel(_stat(panel) if panel.is_stat else _graph(panel))
    document: dict[str, Any] = json.loads(JSONEncoder().encode(built.build()))
    for number, each in enumerate(document["panels"], start=1):
        each["id"] = number
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _frame(page: Page) -> dashboard.Dashboard:
    link = dashboard.DashboardLink("Pagemill").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(link.keep_time(True).include_vars(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "Job", f"label_values({page.scraped}, job)"))
        .with_variable(_variable("instance", "Instance", f'label_values({page.scraped}{{job=~"$job"}}, instance)'))
        .with_variable(_variable("model", "Model", page.models))
    )


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(everything)
    )


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().datasource(SOURCE).expr(expr).legend_format(legend).ref_id(chr(ord("A") + index))
        for index, (expr, legend) in enumerate(panel.targets)
    ]


def _graph(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().title(panel.title).description(panel.description).datasource(SOURCE)
    built.unit(panel.unit).min(0).span(panel.width).height(HEIGHT).fill_opacity(10)
    built.tooltip(common.VizTooltipOptions())
    if panel.max is not None:
        built.max(panel.max)
    for target in _targets(panel):
        built.with_target(target)
    return built


def _stat(panel: Panel) -> stat.Panel:
    built = stat.Panel().title(panel.title).description(panel.description).datasource(SOURCE)
    built.unit(panel.unit).span(panel.width).height(HEIGHT // 2)
    built.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    for target in _targets(panel):
        built.with_target(target)
    return built

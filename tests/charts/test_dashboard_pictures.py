"""The pictures of the dashboards: panels in their rows, with the names and the values of a Prometheus' answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dashboard_plots import DASHBOARDS, Recorded, drawn_rows, expression_of, name_of


class Answers:
    """A Prometheus that answers each expression with the series of its first metric's name."""

    def __init__(self, series: dict[str, list[tuple[dict[str, str], list[float]]]]) -> None:
        self.series = series
        self.asked: list[str] = []

    def get(self, path: str, **parameters: str) -> Any:
        assert path == "query_range"
        self.asked.append(parameters["query"])
        found = next((self.series[name] for name in self.series if name in parameters["query"]), [])
        times = [float(parameters["start"]) + float(parameters["step"]) * number for number in range(3)]
        return {
            "result": [
                {"metric": labels, "values": [[at, str(value)] for at, value in zip(times, values, strict=True)]}
                for labels, values in found
            ]
        }


def drawn(name: str, server: Any) -> list[dict[str, Any]]:
    return drawn_rows(json.loads((DASHBOARDS / f"{name}.json").read_text()), Recorded(server, 1000.0, 1015.0))


@pytest.mark.parametrize("name", sorted(path.stem for path in DASHBOARDS.glob("*.json")))
def test_a_prometheus_without_data_gives_no_panel_and_is_asked_without_variables(name: str) -> None:
    server = Answers({})
    assert drawn(name, server) == []
    assert server.asked
    assert not any("$" in each for each in server.asked)


def test_panels_have_the_lines_that_are_not_zero_throughout() -> None:
    nan = float("nan")
    lines = [({"model": "m", "outcome": "completed"}, [1.0, nan, 3.0]), ({"model": "m", "outcome": "lost"}, [0.0] * 3)]
    rows = drawn("pagemill-gateway", Answers({"sum by (model, outcome) (rate(pagemill_gateway_outcomes_total": lines}))
    assert [row["title"] for row in rows] == ["Requests"]
    (panel,) = rows[0]["panels"]
    assert (panel["title"], panel["unit"], panel["stat"]) == ("Requests", "reqps", None)
    assert (panel["names"], panel["lines"]) == (["m completed"], [[1.0, None, 3.0]])
    assert panel["times"] == [1000.0, 1005.0, 1010.0]


def test_a_number_is_the_latest_one_and_may_be_zero() -> None:
    rows = drawn(
        "pagemill-fleet", Answers({"model:pagemill_waiting_requests:count": [({"model": "m"}, [4.0, 2.0, 0.0])]})
    )
    assert [(panel["title"], panel["stat"]) for panel in rows[0]["panels"]] == [("Waiting", 0.0)]


def test_names_and_expressions_are_filled() -> None:
    assert name_of("{{model}} p{{ rank }}", {"model": "m", "rank": "95"}) == "m p95"
    assert name_of("", {"__name__": "x", "job": "a", "instance": "b"}) == "a, b"
    assert expression_of('rate(x{job=~"$job"}[$__rate_interval])') == 'rate(x{job=~".+"}[30s])'

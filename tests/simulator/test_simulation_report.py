"""The report of simulated fleets: figures, valid self-contained HTML, and charts of what happened."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_simulator.fleet.outcome import Ending, FleetOutcome, FleetPoint, Served
from pagemill_simulator.report import png
from pagemill_simulator.report.axis import axis_of
from pagemill_simulator.report.charts import MOST_POINTS, ChartedRun, TimeUnit, charts_of
from pagemill_simulator.report.svg import draw
from pagemill_simulator.report.write import write_report

CAN_DRAW = png.can_draw
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """An HTML parser that raises for tags that do not close in order and records what the tests need."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.named: list[str] = []
        self.cells: list[list[str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        reported = dict(attrs)
        assert len(reported) == len(attrs), f"an attribute twice in {tag}: {attrs}"
        assert not {"src", "href", "onclick", "onload"}.intersection(reported), f"{tag} refers to another file"
        self.ids += [value for name, value in attrs if name == "id" and value is not None]
        self.named += (reported.get("aria-labelledby") or "").split()
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no pictures except in the tests of pictures, because matplotlib takes long."""
    monkeypatch.setattr(png, "can_draw", lambda: False)


def served(at_s: float, ttft_ms: float | None, tpot_ms: float | None = 20.0, ending: Ending = "served") -> Served:
    return Served(at_s, 100, 50, ending, ttft_ms, tpot_ms if ttft_ms is not None else None)


def outcome(policy: str = "pagemill", *, workload: str = "ramp", requests: list[Served] | None = None) -> FleetOutcome:
    timeline = [FleetPoint(5.0 * n, 1 + n // 10, 0, 1 + max(0, n - 4) // 10, 0, 3) for n in range(60)]
    return FleetOutcome(
        policy=policy,
        workload=workload,
        requests=requests if requests is not None else [served(float(n), 100.0 + n) for n in range(200)],
        timeline=timeline,
        pod_seconds=1234.5,
        duration_s=300.0,
        wall_s=1.5,
        num_scale_ups=5,
        num_scale_downs=2,
        num_flaps=1,
        is_exact=True,
    )


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_table_has_the_figures_of_each_policy(tmp_path: Path) -> None:
    requests = [served(float(n), 10.0 * (n + 1)) for n in range(97)]
    requests += [served(97, None, ending="refused"), served(98, None, ending="lost"), served(99, 5000.0, 90.0)]
    outcomes = [outcome("pagemill", requests=requests), outcome("hpa")]
    path = write_report(outcomes, tmp_path, slo_ttft_ms=500, slo_tpot_ms=50)
    assert path == tmp_path / "report.html"
    page = read(path)
    heads, own, rival = page.cells
    row = dict(zip(heads, own, strict=True))
    assert row["policy"] == "pagemill"
    assert (row["TTFT p50 (ms)"], row["TTFT p95 (ms)"], row["TTFT p99 (ms)"]) == ("490", "940", "5,000")
    assert (row["TPOT p50 (ms)"], row["TPOT p99 (ms)"]) == ("20.0", "90.0")
    assert row["SLO met"] == "50.00%", "refused, lost and slow requests must count as misses"
    assert (row["GPU-seconds"], row["scale-ups"], row["scale-downs"], row["flaps"]) == ("1,234", "5", "2", "1")
    assert (row["refused"], row["lost"], row["most replicas"]) == ("1", "1", "6")
    assert (rival[0], rival[7]) == ("hpa", "100.00%")
    assert "TTFT within 500 ms and TPOT within 50 ms" in " ".join(page.text)


def test_the_page_is_complete_and_names_its_charts(tmp_path: Path) -> None:
    page = read(write_report([outcome(), outcome("hpa")], tmp_path, slo_ttft_ms=1000, slo_tpot_ms=None))
    for tag in ("html", "head", "title", "style", "main", "h1", "table", "caption"):
        assert page.tags[tag] >= 1, tag
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert len(page.ids) == len(set(page.ids))
    assert set(page.named) <= set(page.ids)
    assert page.tags["figure"] == page.tags["desc"] == 5, (
        "arrivals, replicas of each, TTFT over time and its distribution"
    )
    text = (tmp_path / "report.html").read_text()
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert not re.search(r"https?://|@import|url\(", text)


def test_every_chart_is_well_formed_and_has_its_lines(tmp_path: Path) -> None:
    runs = [ChartedRun("pagemill", outcome(), 0), ChartedRun("hpa", outcome("hpa"), 1)]
    for chart in charts_of(runs, slo_ttft_ms=1000):
        root = ElementTree.fromstring(draw(chart, "chart"))
        lines = [path for path in root.iter("path") if "line" in path.get("class", "").split()]
        assert len(lines) == len(chart.lines) > 0
        assert root.findtext("title") == chart.title
        assert root.findtext("desc") == chart.about
        numbers = [float(each) for line in lines for each in re.findall(r"[-\d.]+", line.get("d", ""))]
        assert min(numbers) >= 0
        assert max(numbers) <= 480
        marks = [path for path in root.iter("path") if path.get("class") == "mark"]
        assert len(marks) == len(chart.marks) == chart.name.startswith("ttft")


def test_a_chart_shows_what_happened() -> None:
    arrivals, replicas, ttft, shares = charts_of([ChartedRun("pagemill", outcome(), 0)], slo_ttft_ms=None)
    assert sum(rate for _, rate in arrivals.lines[0].points[:-1]) * 3 == pytest.approx(200)
    wanted, ready = (line.points for line in replicas.lines)
    assert wanted[0] == (0.0, 1.0)
    assert wanted[1] == (50.0, 2.0), "only changes are drawn"
    assert ready[1] == (70.0, 2.0)
    assert wanted[-1] == (300.0, 6.0)
    assert ttft.lines[0].points[0] == (1.5, pytest.approx(0.102))
    assert shares.lines[0].points[-1] == (pytest.approx(0.299), 1.0)
    assert "medians: pagemill 0.20 s" in shares.about


def test_names_are_escaped_and_repeated_policies_numbered(tmp_path: Path) -> None:
    outcomes = [outcome("hpa"), outcome("hpa"), outcome("<b>&", workload='"><script>')]
    page = read(write_report(outcomes, tmp_path, slo_ttft_ms=None, slo_tpot_ms=None))
    assert [row[0] for row in page.cells if row[0] != "policy"] == ["hpa", "hpa (2)", "<b>&"]
    assert page.tags["script"] == 0
    assert page.tags["section"] == 2, "one chart for each workload"
    assert {row[7] for row in page.cells if row[0] != "policy"} == {"–"}, "without an SLO there is no attainment"


def test_reports_of_equal_outcomes_are_equal(tmp_path: Path) -> None:
    """The run time of the simulation is not part of them."""
    slow = outcome()
    quick = FleetOutcome(**{name: getattr(slow, name) for name in slow.__struct_fields__} | {"wall_s": 0.1})
    pages = [
        write_report([each], tmp_path / str(number), slo_ttft_ms=1000, slo_tpot_ms=50).read_text()
        for number, each in enumerate((slow, quick))
    ]
    assert pages[0] == pages[1]


def test_a_run_without_requests_or_first_tokens_is_reported(tmp_path: Path) -> None:
    idle = outcome("fixed", requests=[])
    unserved = outcome("hpa", requests=[served(1, None, ending="lost")])
    page = read(write_report([idle, unserved], tmp_path, slo_ttft_ms=1000, slo_tpot_ms=None))
    assert [row[1] for row in page.cells[1:]] == ["–", "–"]
    assert [row[7] for row in page.cells[1:]] == ["–", "0.00%"]
    with pytest.raises(ValueError, match="no outcome"):
        write_report([], tmp_path, slo_ttft_ms=None, slo_tpot_ms=None)


def test_many_points_are_thinned_out_without_losing_peaks() -> None:
    points = [FleetPoint(5.0 * n, 1 + n % 7, 0, 9 if n == 7777 else 1 + n % 5, 0, 0) for n in range(17_280)]
    requests = [served(8.64 * n, 100.0 + n) for n in range(10_000)]
    whole = outcome(requests=requests)
    long = FleetOutcome(
        **{name: getattr(whole, name) for name in whole.__struct_fields__}
        | {"timeline": points, "duration_s": 86_400.0}
    )
    charts = charts_of([ChartedRun("pagemill", long, 0)], slo_ttft_ms=None)
    assert max(len(line.points) for chart in charts for line in chart.lines) <= MOST_POINTS + 3
    assert max(value for _, value in charts[1].lines[1].points) == 9
    assert charts[0].x_label == "time (h)"


@pytest.mark.slow
def test_charts_are_also_written_as_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason=png.REMEDY)
    monkeypatch.setattr(png, "can_draw", CAN_DRAW)
    write_report([outcome(), outcome("hpa")], tmp_path, slo_ttft_ms=1000, slo_tpot_ms=None)
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == [f"0-ramp-{name}.png" for name in ("arrivals", "replicas-0", "replicas-1", "ttft-shares", "ttft")]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    idle = outcome("fixed", workload="none", requests=[])
    write_report([idle], tmp_path, slo_ttft_ms=1000, slo_tpot_ms=None)


def test_without_matplotlib_only_the_page_is_written(tmp_path: Path) -> None:
    write_report([outcome()], tmp_path, slo_ttft_ms=None, slo_tpot_ms=None)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "pip install 'pagemill[png]'" in png.REMEDY


def test_times_are_reported_in_a_suitable_unit() -> None:
    assert [TimeUnit.of(duration_s).unit for duration_s in (600, 3600, 86_400)] == ["s", "min", "h"]


@given(values=st.lists(st.floats(0, 1e9), max_size=8), is_log=st.booleans())
def test_axes_contain_all_values_and_have_few_rising_ticks(values: list[float], is_log: bool) -> None:
    axis = axis_of(values, is_log=is_log)
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == pytest.approx(1)
    assert axis.ticks == sorted(set(axis.ticks))
    assert 2 <= len(axis.ticks) <= 12
    assert all(axis.low * 0.999 <= tick <= axis.high * 1.001 for tick in axis.ticks)
    assert max(values, default=0.0) <= axis.high * (1 + 1e-9)
    assert math.isfinite(axis.high)

"""The report as one self-contained HTML page, without scripts, images or external fonts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

from pagemill_simulator.fleet.figures import Figures, Quantiles
from pagemill_simulator.report.charts import Chart, ChartedRun
from pagemill_simulator.report.svg import draw, drawing_style, legend

TITLE = "Simulated scaling"
HEADS = (
    "policy",
    "TTFT p50 (ms)",
    "TTFT p95 (ms)",
    "TTFT p99 (ms)",
    "TPOT p50 (ms)",
    "TPOT p95 (ms)",
    "TPOT p99 (ms)",
    "SLO met",
    "GPU-seconds",
    "most replicas",
    "scale-ups",
    "scale-downs",
    "flaps",
    "refused",
    "lost",
)


def section(
    number: int, workload: str, runs: Sequence[ChartedRun], figures: Sequence[Figures], charts: Sequence[Chart]
) -> str:
    """Return the section of all policies under one workload; `figures` have the order of `runs`."""
    rows = "\n".join(_row(run.label, each) for run, each in zip(runs, figures, strict=True))
    heads = "".join(f'<th scope="col">{head}</th>' for head in HEADS)
    drawn = "\n".join(_figure(chart, f"chart-{number}-{place}") for place, chart in enumerate(charts))
    first = figures[0]
    return f"""<section aria-labelledby="workload-{number}">
<h2 id="workload-{number}">{escape(workload)}</h2>
<p>{first.num_requests:,} requests in {first.duration_s:,.0f} s.</p>
<div class="scroll" role="region" aria-label="Figures under {escape(workload)}" tabindex="0">
<table>
<caption>Each policy under the same requests.</caption>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<div class="charts">
{drawn}
</div>
</section>"""


def page(sections: Sequence[str], *, slo: str, is_exact: bool) -> str:
    """Return the page; `slo` is the SLO in words, or empty."""
    how = "Every step was scheduled by the engine's own scheduler." if is_exact else "Engines ran in fast-forward."
    aim = f"The SLO is {slo}; requests that were refused or lost have missed it." if slo else "There is no SLO."
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<style>
{_style()}</style>
</head>
<body>
<main>
<h1>{TITLE}</h1>
<p>{escape(aim)}</p>
<p>{escape(how)} TTFT: time to first token; TPOT: mean time between the tokens of an answer. GPU-seconds run from a
replica's place until it gives it back. A flap is a change that was taken back within five minutes.</p>
{body}
</main>
</body>
</html>
"""


def _row(label: str, figures: Figures) -> str:
    cells = [
        *_quantiles(figures.ttft_ms),
        *_quantiles(figures.tpot_ms),
        "–" if figures.slo_attained is None else f"{figures.slo_attained:.2%}",
        f"{figures.pod_seconds:,.0f}",
        f"{figures.most_replicas}",
        f"{figures.num_scale_ups}",
        f"{figures.num_scale_downs}",
        f"{figures.num_flaps}",
        f"{figures.num_refused:,}",
        f"{figures.num_lost:,}",
    ]
    return f'<tr><th scope="row">{escape(label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _quantiles(quantiles: Quantiles) -> list[str]:
    values = (quantiles.p50, quantiles.p95, quantiles.p99)
    return ["–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in values]


def _figure(chart: Chart, ident: str) -> str:
    key = legend(chart.lines) if len(chart.lines) > 1 else ""
    return f"<figure>\n<figcaption>{escape(chart.title)}</figcaption>\n{draw(chart, ident)}\n{key}\n</figure>"


@cache
def _style() -> str:
    return drawing_style() + files(__package__).joinpath("style.css").read_text(encoding="utf-8")

"""The arithmetic: percentiles of both sides, the spread of repeats, and the simulation's error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagemill_protocol.report.state import StepTimeParams

PERCENTS = (50, 95)
COLUMNS = ["load", "figure", "measured", "repeats", "spread %", "simulated", "error %"]


class Latencies(NamedTuple):
    """Times of all requests of one run in milliseconds."""

    ttfts_ms: list[float]
    tpots_ms: list[float]

    def quantiles(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, values in (("TTFT", self.ttfts_ms), ("TPOT", self.tpots_ms)):
            found |= {f"{name} p{percent}": round(quantile(values, percent), 2) for percent in PERCENTS}
        return found


class Band(NamedTuple):
    """The measured and the simulated latencies at one load."""

    name: str
    rate: float
    num_requests: int
    measured: list[Latencies]
    simulated: Latencies
    step_time_after: StepTimeParams = StepTimeParams()
    """The engine's step times after the last repeat: how far the machine has drifted since the calibration."""


class Comparison(NamedTuple):
    figure: str
    repeats: list[float]
    simulated: float

    @property
    def measured(self) -> float:
        """Mean of the repeats."""
        return sum(self.repeats) / len(self.repeats)

    @property
    def spread(self) -> float:
        """Difference between the highest and the lowest repeat, as a share of their mean."""
        return (max(self.repeats) - min(self.repeats)) / self.measured

    @property
    def error(self) -> float:
        """Relative error; above 0 the simulated value is larger."""
        return self.simulated / self.measured - 1.0


def quantile(values: Iterable[float], percent: int) -> float:
    """Return the quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def comparisons(band: Band) -> list[Comparison]:
    measured = [each.quantiles() for each in band.measured]
    return [
        Comparison(figure, [each[figure] for each in measured], value)
        for figure, value in band.simulated.quantiles().items()
    ]


def rows(bands: Sequence[Band]) -> list[list[str]]:
    return [[_title(band), *_cells(each)] for band in bands for each in comparisons(band)]


def plan_rows(rate: float, found: Sequence[Comparison]) -> list[list[str]]:
    """Return the rows of one length at one load."""
    return [[f"plan: {rate:.2f}/s", *_cells(each)] for each in found]


def _title(band: Band) -> str:
    return f"{band.name}: {band.num_requests} requests at {band.rate:.2f}/s"


def _cells(each: Comparison) -> list[str]:
    repeats = ", ".join(f"{value:.1f}" for value in each.repeats)
    spread = f"{100 * each.spread:.0f}" if len(each.repeats) > 1 else "-"
    return [each.figure, f"{each.measured:.1f}", repeats, spread, f"{each.simulated:.1f}", f"{100 * each.error:+.0f}"]

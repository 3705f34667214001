"""Runs the simulations one after the other and writes their report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pagemill.planning.errors import PlanError
from pagemill.printable import printable
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.report import png
from pagemill_simulator.report.write import write_report
from pagemill_simulator.scaling.policy import FleetScaler
from pagemill_simulator.workloads.request import Workload


@contextmanager
def progress_of(name: str) -> Iterator[Callable[[float], None] | None]:
    """Yield a function to call with the completed share; `None` without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(name), total=1.0)
        yield lambda share: progress.update(task, completed=share)


def run(
    workload: Workload,
    settings: FleetSettings,
    policies: Sequence[FleetScaler],
    report: Path | None,
    *,
    fast: bool = False,
) -> list[FleetOutcome]:
    """Run the simulation of each policy; return the outcomes. Raises `PlanError` if the report cannot be written."""
    if report is not None:
        _make(report)
    outcomes = []
    for policy in policies:
        with progress_of(policy.name) as progress:
            outcomes.append(simulate_fleet(workload, settings, policy, fast=fast, progress=progress))
    if report is not None:
        _report(outcomes, report, settings)
    return outcomes


def report_folder(report: Path | None, device: str, num_devices: int) -> Path | None:
    """Return the folder for one device's report: the given one, or a folder in it if there are several devices."""
    return report if report is None or num_devices == 1 else report / device


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--report {folder}: cannot be created: {error.strerror}; name another folder") from None


def _report(outcomes: Sequence[FleetOutcome], folder: Path, settings: FleetSettings) -> None:
    """Write the report, and its path to stderr, so that stdout has the results only."""
    try:
        page = write_report(outcomes, folder, slo_ttft_ms=settings.slo_ttft_ms, slo_tpot_ms=settings.slo_tpot_ms)
    except OSError as error:
        raise PlanError(f"--report {folder}: cannot be written: {error.strerror}; name another folder") from None
    typer.echo(printable(f"report: {page}"), err=True)
    if not png.can_draw():
        typer.echo(png.REMEDY, err=True)

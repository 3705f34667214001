"""The subject of `plan` and `simulate`: one deployment of a file, its SLO, its accelerator. Options override the
file."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from pagemill.planning.accelerators import ACCELERATORS, Accelerator, find_accelerator
from pagemill.planning.errors import PlanError
from pagemill.up.loading import Loaded, load_files
from pagemill.up.screen import report_errors
from pagemill_crds.quantities import duration_seconds
from pagemill_operator.autoscaler.settings import Slo


def load_one(file: Path, name: str | None) -> Loaded:
    """Raises `PlanError`, or exits with 2 after reporting the errors of the file."""
    result = load_files([file], backend="kubernetes")
    if result.findings:
        report_errors(str(finding) for finding in result.findings)
        raise typer.Exit(2)
    names = [item.plan.name for item in result.loaded]
    chosen = [item for item in result.loaded if name in (None, item.plan.name)]
    if not chosen:
        raise PlanError(f"--name {name}: {file} has no such LLMDeployment; it has {', '.join(names)}")
    if len(chosen) > 1:
        raise PlanError(f"{file}: has several LLMDeployments; choose one with --name: {', '.join(names)}")
    return chosen[0]


def slo_of(given: Slo | None, ttft: str | None, tpot: str | None, percentile: int | None) -> Slo:
    """The SLO of the file, overridden by the options; with neither, only the load must be carried. Raises
    `PlanError`."""
    known = given or Slo()
    return Slo(
        ttft_ms=milliseconds("--ttft", ttft) if ttft is not None else known.ttft_ms,
        tpot_ms=milliseconds("--tpot", tpot) if tpot is not None else known.tpot_ms,
        share=known.share if percentile is None else percentile / 100,
    )


def milliseconds(option: str, duration: str) -> float:
    """A duration above 0. Raises `PlanError`."""
    value = seconds(option, duration) * 1000
    if value <= 0:
        raise PlanError(f"{option} {duration}: must be above 0; write it like 300ms")
    return value


def seconds(option: str, duration: str) -> float:
    """A duration in seconds. Raises `PlanError`."""
    try:
        return duration_seconds(duration)
    except ValueError as error:
        raise PlanError(f"{option} {error}") from None


def accelerator_of(loaded: Loaded, name: str | None) -> Accelerator | None:
    """The one asked for, or the one that the file's pods would get. Raises `PlanError`."""
    resources = loaded.deployment.spec.resources
    wanted = name or (resources.gpu_product if resources.gpus else None)
    known = ", ".join(each.name for each in ACCELERATORS)
    if wanted is None and resources.gpus:
        raise PlanError(f"spec.resources.gpus {resources.gpus}: name the accelerator with --accelerator: {known}")
    if wanted is None:
        return None
    accelerator = find_accelerator(wanted)
    if accelerator is None:
        field = f"--accelerator {name}" if name else f"spec.resources.gpuProduct {wanted}"
        raise PlanError(f"{field}: is not known here; name one with --accelerator: {known}")
    return accelerator


def tell(words: str) -> None:
    """Progress on stderr; never between the figures on stdout."""
    if sys.stderr.isatty():
        typer.echo(words, err=True)

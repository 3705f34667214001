"""`pagemill plan`: what a deployment would need and cost under a load, answered before anything is deployed.

Parsing and checking of options only; the parts are `pagemill.planning`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from pagemill.planning.accelerators import Accelerator
    from pagemill.up.loading import Loaded
    from pagemill_operator.autoscaler.policy import Slo

MOST_REPLICAS = 1000
"""Weighed where the file names no bound."""


def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file with the LLMDeployment.")],
    rps: Annotated[float, typer.Option(help="Requests per second.")],
    input: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, mean.")],
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer, mean.")],
    name: Annotated[str | None, typer.Option(help="Which LLMDeployment of the file, if it has several.")] = None,
    cached: Annotated[int, typer.Option(min=0, help="Tokens of each prompt that the prefix cache has.")] = 0,
    ttft: Annotated[
        str | None, typer.Option(help="Time to first token to keep, such as 500ms (default: the file's SLO).")
    ] = None,
    tpot: Annotated[
        str | None, typer.Option(help="Time per output token to keep, such as 50ms (default: the file's SLO).")
    ] = None,
    percentile: Annotated[
        int | None, typer.Option(min=50, max=99, help="Percentage that must keep it (default: the file's, or 95).")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Price of one replica for one hour (default: cost.gpuHour for each GPU).")
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="Reckon with an accelerator's data sheet: a100-80gb, h100-80gb, h200, l4, l40s."),
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Step times to use: `pagemill why NAME -o json`, or an earlier plan's JSON.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Folder or .gguf file to read in place of model.source.")] = None,
    measure_s: Annotated[
        float, typer.Option("--measure-s", min=1, max=600, help="Seconds of measuring, where this machine is measured.")
    ] = 10.0,
    format: Annotated[Literal["table", "json"], typer.Option("--format", "-o", help="For people, or whole.")] = "table",
) -> None:
    """Tell what a deployment would need and cost under a load."""
    from pagemill.planning.errors import PlanError
    from pagemill.planning.forecast import Workload, forecast, is_positive
    from pagemill.planning.rehearsal import rehearse
    from pagemill.planning.replica import Means, replica_of
    from pagemill.planning.report import as_json, as_table
    from pagemill.printable import printable

    try:
        for option, number in (("--rps", rps), ("--price-per-hour", price_per_hour)):
            if number is not None and not is_positive(number):
                raise PlanError(f"{option} {number:g}: must be a number above 0")
        if cached >= input:
            raise PlanError(f"--cached {cached}: must be less than --input {input}; the last token is always computed")
        loaded = _load(file, name)
        spec, found = loaded.deployment.spec, loaded.plan
        slo = _slo(loaded, ttft, tpot, percentile)
        workload = Workload(rps, input, output, cached)
        means = Means(fit, _accelerator(loaded, accelerator), model, measure_s, _tell)
        replica = replica_of(found, means, input, output)
        most = spec.autoscaling.max_replicas if spec.autoscaling else MOST_REPLICAS
        result = forecast(replica, workload, slo, most, _price(loaded, price_per_hour))
    except PlanError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    rehearsed = None
    # What cannot keep up has no latency, and no prompt of the simulation is cached in part.
    if result.chosen.ttft_ms is not None and not cached:
        rate = rps / result.chosen.replicas
        rehearsed = rehearse(replica.shape, input, output, rate, slo.share, overlaps=replica.overlaps)
    show = as_json if format == "json" else as_table
    typer.echo(show(found, replica, workload, slo, result, rehearsed))
    if result.needed is None:
        raise typer.Exit(1)


def _load(file: Path, name: str | None) -> Loaded:
    from pagemill.planning.errors import PlanError
    from pagemill.up.loading import load_files
    from pagemill.up.screen import report_errors

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


def _slo(loaded: Loaded, ttft: str | None, tpot: str | None, percentile: int | None) -> Slo:
    """Each option in place of the file's; with neither only the load must be carried."""
    from pagemill_operator.autoscaler.policy import Slo

    policy = loaded.plan.autoscaling
    given = policy.slo if policy is not None and policy.slo is not None else Slo()
    return Slo(
        ttft_ms=_ms("--ttft", ttft) if ttft is not None else given.ttft_ms,
        tpot_ms=_ms("--tpot", tpot) if tpot is not None else given.tpot_ms,
        share=given.share if percentile is None else percentile / 100,
    )


def _ms(option: str, duration: str) -> float:
    from pagemill.planning.errors import PlanError
    from pagemill_crds.quantities import duration_seconds

    try:
        value = duration_seconds(duration) * 1000
    except ValueError as error:
        raise PlanError(f"{option} {error}") from None
    if value <= 0:
        raise PlanError(f"{option} {duration}: must be above 0; write it like 300ms")
    return value


def _accelerator(loaded: Loaded, name: str | None) -> Accelerator | None:
    """As asked for, or what the file's pods would get."""
    from pagemill.planning.accelerators import ACCELERATORS, find_accelerator
    from pagemill.planning.errors import PlanError

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


def _price(loaded: Loaded, price_per_hour: float | None) -> float | None:
    spec = loaded.deployment.spec
    if price_per_hour is not None or spec.cost is None or spec.cost.gpu_hour is None or not spec.resources.gpus:
        return price_per_hour
    return spec.cost.gpu_hour * spec.resources.gpus


def _tell(words: str) -> None:
    """What takes time, for whoever waits; never between the figures."""
    if sys.stderr.isatty():
        typer.echo(words, err=True)

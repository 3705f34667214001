"""`pagemill plan`: what a deployment would need and cost under a load, computed before anything is deployed.

Parses and checks options only; `pagemill.planning` does the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagemill.planning.options import Accelerator, Fit, Format, MeasureS, Model, Tpot, Ttft

if TYPE_CHECKING:
    from pagemill.up.loading import Loaded

MOST_REPLICAS = 1000
"""Considered if the file sets no maximum."""


def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file with the LLMDeployment.")],
    rps: Annotated[float, typer.Option(help="Requests per second.")],
    input: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, mean.")],
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer, mean.")],
    name: Annotated[str | None, typer.Option(help="Which LLMDeployment of the file, if it has several.")] = None,
    cached: Annotated[int, typer.Option(min=0, help="Tokens of each prompt that the prefix cache has.")] = 0,
    ttft: Ttft = None,
    tpot: Tpot = None,
    percentile: Annotated[
        int | None, typer.Option(min=50, max=99, help="Percentage that must keep it (default: the file's, or 95).")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Price of one replica for one hour (default: cost.gpuHour for each GPU).")
    ] = None,
    accelerator: Accelerator = None,
    fit: Fit = None,
    model: Model = None,
    measure_s: MeasureS = 10.0,
    format: Format = "table",
) -> None:
    """Compute what a deployment needs and costs under a load."""
    from pagemill.planning.choosing import accelerator_of, load_one, slo_of, tell
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
        loaded = load_one(file, name)
        spec, found = loaded.deployment.spec, loaded.plan
        slo = slo_of(found.autoscaling.slo if found.autoscaling else None, ttft, tpot, percentile)
        workload = Workload(rps, input, output, cached)
        means = Means(fit, accelerator_of(loaded, accelerator), model, measure_s, tell)
        replica = replica_of(found, means, input, output)
        most = spec.autoscaling.max_replicas if spec.autoscaling else MOST_REPLICAS
        result = forecast(replica, workload, slo, most, _price(loaded, price_per_hour))
    except PlanError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    rehearsed = None
    # A replica that cannot keep up has no latency, and the simulation caches no prompt in part.
    if result.chosen.ttft_ms is not None and not cached:
        rate = rps / result.chosen.replicas
        rehearsed = rehearse(replica.shape, input, output, rate, slo.share, overlaps=replica.overlaps)
    show = as_json if format == "json" else as_table
    typer.echo(show(found, replica, workload, slo, result, rehearsed))
    if result.needed is None:
        raise typer.Exit(1)


def _price(loaded: Loaded, price_per_hour: float | None) -> float | None:
    spec = loaded.deployment.spec
    if price_per_hour is not None or spec.cost is None or spec.cost.gpu_hour is None or not spec.resources.gpus:
        return price_per_hour
    return spec.cost.gpu_hour * spec.resources.gpus

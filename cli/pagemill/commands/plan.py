"""`pagemill plan`: what a deployment would need and cost under a load, computed before anything is deployed.

Parses and checks options only; `pagemill.planning` does the rest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pagemill.planning.options import (
    Accelerators,
    File,
    Fit,
    Format,
    MeasureS,
    Models,
    PricesPerHour,
    Tpot,
    Ttft,
)


def plan(
    input: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, mean.")],
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer, mean.")],
    file: File = None,
    rps: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Users in place of a rate: each asks again after an answer and --think.")
    ] = None,
    think: Annotated[
        str | None, typer.Option(help="Time from an answer to a user's next request, such as 30s.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Which LLMDeployment of the file, if it has several.")] = None,
    cached: Annotated[int, typer.Option(min=0, help="Tokens of each prompt that the prefix cache has.")] = 0,
    ttft: Ttft = None,
    tpot: Tpot = None,
    percentile: Annotated[
        int | None, typer.Option(min=50, max=99, help="Percentage that must keep it (default: the file's, or 95).")
    ] = None,
    price_per_hour: PricesPerHour = None,
    accelerator: Accelerators = None,
    fit: Fit = None,
    model: Models = None,
    measure_s: MeasureS = 10.0,
    format: Format = "table",
) -> None:
    """Compute what a deployment, or a model alone, needs and costs under a load."""
    from pagemill.planning import comparison, report
    from pagemill.planning.answering import Question, answers, load_of
    from pagemill.planning.choosing import load_one, slo_of, subjects_of
    from pagemill.planning.errors import PlanError
    from pagemill.planning.prices import prices_of
    from pagemill.printable import printable

    try:
        load, asking = load_of(rps, users, think, input, output, cached)
        prices = prices_of(price_per_hour or [])
        models: list[str | None] = [*dict.fromkeys(model or [])]
        deployments = [(each, load_one(file, name, each)) for each in models or [None]]
        subjects = subjects_of(deployments, accelerator or [], fit)
        autoscaling = deployments[0][1].plan.autoscaling
        slo = slo_of(autoscaling.slo if autoscaling else None, ttft, tpot, percentile)
        found = answers(Question(load, asking, slo, prices, fit, measure_s), subjects)
    except PlanError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    if len(found) > 1:
        show_all = comparison.as_json if format == "json" else comparison.as_table
        typer.echo(show_all(found, load, asking, slo))
    else:
        only = found[0].answer
        assert only is not None, "what cannot be planned alone is an error"
        typer.echo(report.as_json(only) if format == "json" else report.as_table(only))
    if all(each.answer is None or each.answer.forecast.needed is None for each in found):
        raise typer.Exit(1)

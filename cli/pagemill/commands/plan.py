"""`pagemill plan`: computes what a deployment would need and cost under a load before it is deployed.

This module parses the options; `pagemill.planning` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pagemill.command import CommandWithOptions
from pagemill.planning.options import (
    Accelerators,
    File,
    Fit,
    Format,
    MeasureS,
    Models,
    PricesPerHour,
    TokensPerDecode,
    Tpot,
    Ttft,
)


@dataclass(frozen=True)
class PlanCommand(CommandWithOptions):
    """Compute the replicas, latencies and cost of a deployment, or of a model alone, under a load."""

    input: Annotated[int, typer.Option(min=1, help="Mean number of tokens in a prompt.")]
    output: Annotated[int, typer.Option(min=1, help="Mean number of tokens in an answer.")]
    file: File = None
    rps: Annotated[float | None, typer.Option(help="Requests per second; give either this or --users.")] = None
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of users instead of a rate. Each one sends a request, gets the answer, waits for --think and "
            "sends the next request.",
        ),
    ] = None
    think: Annotated[
        str | None, typer.Option(help="Time between an answer and the user's next request, such as 30s.")
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the LLMDeployment, if the file has several.")] = None
    cached: Annotated[
        int, typer.Option(min=0, help="Number of tokens of each prompt that are found in the prefix cache.")
    ] = 0
    ttft: Ttft = None
    tpot: Tpot = None
    percentile: Annotated[
        int | None,
        typer.Option(
            min=50, max=99, help="Percentage of requests that must meet --ttft and --tpot (default: the file's, or 95)."
        ),
    ] = None
    price_per_hour: PricesPerHour = None
    accelerator: Accelerators = None
    roles: Annotated[
        bool,
        typer.Option(
            "--roles",
            help="Also compare with replicas that only compute prompts beside replicas that only decode, for every "
            "pair of accelerators. A forecast: Pagemill does not serve separate roles yet.",
        ),
    ] = False
    link_gbit_per_s: Annotated[
        float | None,
        typer.Option(
            "--link-gbit-per-s",
            help="With --roles: speed of the network of each replica, over which the KV cache of each prompt passes, "
            "in Gbit/s (default: 25).",
        ),
    ] = None
    fit: Fit = None
    tokens_per_decode: TokensPerDecode = None
    model: Models = None
    measure_s: MeasureS = 10.0
    format: Format = "table"

    def run(self) -> None:
        from pagemill.planning import comparison, report
        from pagemill.planning.answering import Question, answers, load_of
        from pagemill.planning.choosing import load_one, slo_of, subjects_of
        from pagemill.planning.errors import PlanError
        from pagemill.planning.prices import check_prices, prices_of
        from pagemill.planning.replica import per_decode_of
        from pagemill.planning.roles.pairs import check_roles, pair_answers
        from pagemill.printable import printable

        try:
            load, asking = load_of(self.rps, self.users, self.think, self.input, self.output, self.cached)
            gbit_per_s = check_roles(self.roles, self.link_gbit_per_s, self.output)
            prices = prices_of(self.price_per_hour or [])
            models: list[str | None] = [*dict.fromkeys(self.model or [])]
            deployments = [(each, load_one(self.file, self.name, each)) for each in models or [None]]
            subjects = subjects_of(deployments, self.accelerator or [], self.fit)
            check_prices(subjects, prices)
            autoscaling = deployments[0][1].plan.autoscaling
            slo = slo_of(autoscaling.slo if autoscaling else None, self.ttft, self.tpot, self.percentile)
            question = Question(
                load, asking, slo, prices, self.fit, self.measure_s, per_decode_of(self.tokens_per_decode)
            )
            found = answers(question, subjects, compares=self.roles or len(subjects) > 1)
            pairs = None if gbit_per_s is None else pair_answers(question, found, gbit_per_s)
        except PlanError as error:
            typer.echo(printable(f"error: {error}"), err=True)
            raise typer.Exit(2) from None
        if self.roles or len(found) > 1:
            show_all = comparison.as_json if self.format == "json" else comparison.as_table
            typer.echo(show_all(comparison.Compared(found, pairs, load, asking, slo)))
        else:
            only = found[0].answer
            assert only is not None, "answers() raises PlanError if the only subject has no answer"
            typer.echo(report.as_json(only) if self.format == "json" else report.as_table(only))
        if all(each.answer is None or each.answer.forecast.needed is None for each in found):
            raise typer.Exit(1)

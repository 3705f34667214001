"""`pagemill bench`: sends a limited number of requests to a running server and measures what its clients see.

This module parses the options; `pagemill.bench` does the rest. Offline throughput and comparisons with other engines
are in the repository's `bench/`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer

from pagemill.command import CommandWithOptions
from pagemill.commands.chat import DEFAULT_URL

if TYPE_CHECKING:
    from pagemill.bench.conversations import BenchWorkload
    from pagemill.bench.results import Result
    from pagemill.bench.samples import BenchRun, LatencyLimits
    from pagemill.bench.sending import BenchTarget, Load
    from pagemill.bench.sweeping import Point
    from pagemill.bench.texts import TextLengths

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 64
CYCLES = 4
"""In a sweep each client sends at least so many requests."""


@dataclass(frozen=True)
class BenchCommand(CommandWithOptions):
    """Measure the latency and throughput of a running server.

    Without --dataset or --workload, the prompts are random words of the given lengths. The last line of output is JSON.
    """

    url: Annotated[str, typer.Option(help="URL of the gateway or engine to measure.")] = DEFAULT_URL
    model: Annotated[str | None, typer.Option(help="Model to request (default: the first one served).")] = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="File with requests: conversations as in ShareGPT, JSON lines with `messages` or `prompt`, a trace of "
            "Mooncake, Azure or BurstGPT, or the JSON lines of a gateway's log."
        ),
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(help="Generator of traffic, as for `pagemill simulate`, such as agentic or burst:rate=2."),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Number of requests to send (default: 64, or with --dataset or --workload all). A sweep sends so many "
            "for each load.",
        ),
    ] = None
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Tokens of each prompt's text, about; all prompts are different.")
    ] = 64
    output_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Tokens to generate, where a file does not say how many.")
    ] = 64
    sigma: Annotated[
        float,
        typer.Option(min=0, max=5, help="Standard deviation of the logarithm of both lengths; 0: all are equal."),
    ] = 0.0
    turns: Annotated[
        int, typer.Option(min=1, max=1000, help="Requests of a conversation, each with everything said before.")
    ] = 1
    prefix_groups: Annotated[
        int, typer.Option(min=0, max=100_000, help="Number of system prompts that the conversations share.")
    ] = 0
    prefix_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of a shared system prompt.")] = 512
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Number of clients that send requests one after the other (default: 8)."),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Mean number of conversations that begin per second, whether or not others have ended."
        ),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(min=0.01, max=100, help="Shape of the gaps at --rate: 1 is a Poisson process, less has bursts."),
    ] = 1.0
    speedup: Annotated[
        float, typer.Option(min=0.001, help="Divide the recorded times of a trace by this: 2 doubles its rate.")
    ] = 1.0
    sweep: Annotated[
        Literal["clients", "rates"] | None,
        typer.Option(
            help="Measure several loads: 1, 2, 4 ... clients until throughput stops growing, or also rates around it."
        ),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo", help="Limits that a good request keeps, such as ttft=500ms,tpot=50ms,e2e=10s; adds the goodput."
        ),
    ] = None
    max_seconds: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="Stop a load after this many seconds, even if requests are unfinished."),
    ] = 60
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature.")] = 0.0
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Generate all tokens even where the model would end; servers without `ignore_eos` refuse it."
        ),
    ] = True
    seed: Annotated[int, typer.Option(help="Seed for the prompts and the arrival times.")] = 0
    save: Annotated[Path | None, typer.Option(help="Write the result with every request to this file.")] = None
    plot: Annotated[Path | None, typer.Option(help="Write the plots to this SVG file.")] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="BEFORE AFTER", help="Measure nothing: compare two files of --save, with confidence intervals."
        ),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="PAGEMILL_API_KEY", help="API key for the gateway (a bearer token).")
    ] = None
    format: Annotated[
        Literal["table", "json"],
        typer.Option("--format", "-o", help="Output format: tables and plots followed by JSON, or the JSON alone."),
    ] = "table"
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Allow a --url on another machine. Measure only servers of your own."),
    ] = False

    def run(self) -> None:
        import uvloop

        from pagemill.bench.conversations import BenchError
        from pagemill.client import ClientError

        try:
            if self.compare is not None:
                self._compare(*self.compare)
                return
            self._check()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result, errors = runner.run(self._measured())
            self._write(result)
        except (BenchError, ClientError) as error:
            typer.echo(f"pagemill bench: {error}", err=True)
            raise typer.Exit(1) from error
        if errors:
            typer.echo(f"{len(errors)} requests failed; the first: {errors[0]}", err=True)
            raise typer.Exit(1)

    def _check(self) -> None:
        """Raises `ClientError` or `BenchError` for options that contradict each other or may not be."""
        from pagemill.bench.conversations import BenchError

        _check_target(self.url, self.allow_remote)
        options: dict[str, object] = {
            "--concurrency": self.concurrency,
            "--rate": self.rate,
            "--sweep": self.sweep,
            "--dataset": self.dataset,
            "--workload": self.workload,
        }
        given = {name: value for name, value in options.items() if value is not None}
        for group in (("--concurrency", "--rate", "--sweep"), ("--dataset", "--workload")):
            first, *others = [name for name in given if name in group] or [""]
            if others:
                raise BenchError(
                    f"{first} {given[first]}: does not go with {others[0]} {given[others[0]]}; remove one."
                )

    async def _measured(self) -> tuple[Result, list[str]]:
        from pagemill.bench.conversations import BenchError
        from pagemill.bench.exchange import Exchanges
        from pagemill.bench.results import Measured, Result
        from pagemill.bench.sending import BenchTarget, text_lengths
        from pagemill.client import ChatClient, first_model

        slo = _slo(self.slo)
        async with ChatClient(self.url, api_key=self.api_key) as client:
            model, _ = await first_model(client, self.model)
        exchanges = Exchanges(self.url, self.api_key)
        target = BenchTarget(exchanges, model, self.output_tokens, self.ignore_eos, self.temperature)
        try:
            played = self._workloads(await text_lengths(target))
            first = played(0, 1)
            points = await self._points(target, first, played)
        except OSError as error:
            raise BenchError(str(error)) from None
        finally:
            exchanges.close()
        measured = [
            Measured(point.load.name, point.load.concurrency, point.load.rate_per_s, point.run) for point in points
        ]
        errors = [error for point in points for error in point.run.errors]
        if not any(point.run.samples for point in points):
            cause = errors[0] if errors else f"none finished within {self.max_seconds:g} s (--max-seconds)."
            raise BenchError(f"No request succeeded: {cause}")
        if self.sweep is not None and self.format == "table":
            from pagemill.bench.printing import sweep_summary
            from pagemill.bench.sweeping import highest_good, saturation

            typer.echo(sweep_summary(saturation(points), highest_good(points, slo), slo))
        return Result(model, first.source, slo, measured), errors

    def _workloads(self, sizes: TextLengths) -> Callable[[int, int], BenchWorkload]:
        """Return a function from a load's number, and its number of clients, to what is sent at it.

        Generated texts are different for each load; a file's conversations begin where the load before ended.
        """
        from pagemill.bench.conversations import first_requests, rotated
        from pagemill.bench.datasets import read_dataset
        from pagemill.bench.generated import DrawnLengths, drawn, of_generator

        def count(clients: int) -> int:
            return max(self.requests or DEFAULT_REQUESTS, CYCLES * clients if self.sweep else 0)

        if self.dataset is not None or self.workload is not None:
            if self.dataset is not None:
                whole = read_dataset(self.dataset, self.seed, sizes, speedup=self.speedup)
            else:
                whole = of_generator(self.workload or "", self.seed, sizes)
            if self.requests is None and self.sweep is None:
                return lambda number, clients: whole
            return lambda number, clients: first_requests(rotated(whole, number * count(clients)), count(clients))
        lengths = DrawnLengths(
            self.prompt_tokens, self.output_tokens, self.sigma, self.turns, self.prefix_groups, self.prefix_tokens
        )
        return lambda number, clients: drawn(lengths, count(clients), self.seed + number, sizes)

    async def _points(
        self, target: BenchTarget, first: BenchWorkload, played: Callable[[int, int], BenchWorkload]
    ) -> list[Point]:
        """Measure at each load. `first` is sent at the first one: only sweeps send more, from one client on."""
        from pagemill.bench.printing import ProgressLine
        from pagemill.bench.sending import Load, run
        from pagemill.bench.sweeping import Point, sweep_clients, sweep_rates

        async def measure(load: Load, number: int) -> BenchRun:
            workload = played(number, load.concurrency or 1) if number else first
            show = ProgressLine(load.name, workload.num_requests)
            done = await run(target, workload, load, self.seed, self.max_seconds, show)
            if len(done.samples) + len(done.errors) < workload.num_requests and not done.errors:
                sys.stderr.write(f"{load.name}: stopped after {self.max_seconds:g} s (--max-seconds)\n")
            return done

        if self.sweep == "clients":
            return await sweep_clients(measure)
        if self.sweep == "rates":
            return await sweep_rates(measure, self.burstiness)
        recorded = self.concurrency is None and self.rate is None and first.has_times
        clients = None if recorded or self.rate is not None else self.concurrency or DEFAULT_CONCURRENCY
        load = Load(clients, self.rate, self.burstiness)
        return [Point(load, await measure(load, 0))]

    def _write(self, result: Result) -> None:
        from pagemill.bench.plots import as_svg, charts_of
        from pagemill.bench.printing import table_of
        from pagemill.bench.results import write_result, write_text

        if self.save is not None:
            write_result(self.save, result)
        if self.plot is not None:
            write_text("--plot", self.plot, as_svg(charts_of(result)).encode())
        if self.format == "table":
            typer.echo(table_of(result))
        reports = [result.report(each) for each in result.measured]
        typer.echo(json.dumps(reports[0] if self.sweep is None else {"model": result.model, "loads": reports}))

    def _compare(self, before: Path, after: Path) -> None:
        from pagemill.bench.comparing import differences
        from pagemill.bench.conversations import BenchError
        from pagemill.bench.printing import differences_of
        from pagemill.bench.results import read_result

        old, new = read_result(before), read_result(after)
        runs = {each.load: each.run for each in old.measured}
        found = [
            (each.load, differences(runs[each.load], each.run, self.seed)) for each in new.measured if each.load in runs
        ]
        if not found:
            loads = ", ".join(each.load for each in new.measured)
            raise BenchError(
                f"--compare {before}: has none of the loads of {after} ({loads}); measure at the same ones"
            )
        if self.format == "table":
            typer.echo(differences_of(found))
        typer.echo(json.dumps({load: {each.name: each.as_json() for each in group} for load, group in found}))


def _slo(text: str | None) -> LatencyLimits:
    from pagemill.bench.conversations import BenchError
    from pagemill.bench.samples import LatencyLimits
    from pagemill_protocol.resource.quantities import duration_seconds

    limits: dict[str, float] = {}
    for pair in (text or "").split(",") if text else ():
        name, _, duration = pair.strip().partition("=")
        if name not in LatencyLimits.__struct_fields__:
            raise BenchError(
                f"--slo {pair}: expected one of {', '.join(LatencyLimits.__struct_fields__)}, as in ttft=500ms"
            )
        try:
            limits[name] = duration_seconds(duration)
        except ValueError as error:
            raise BenchError(f"--slo {pair}: {error}") from None
    return LatencyLimits(**limits)


def _check_target(url: str, allow_remote: bool) -> None:
    from pagemill.client import ClientError, check_url

    check_url(url)
    host = urlsplit(url).hostname or ""
    if allow_remote or host == "localhost":
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ClientError(f"--url {host or url} is another machine; add --allow-remote if that server is your own.")

"""`pagemill bench`: sends a limited number of requests to a running server and measures what its clients see.

It reports time to first token (TTFT), time per output token (TPOT), inter-token latency (ITL) and throughput. The load
is a closed loop (a fixed number of clients) or, with `--rate`, an open loop with Poisson arrivals, where requests queue
as they would in production. Offline throughput and comparisons with other engines are in the repository's `bench/`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from pagemill.client import ChatClient, ClientError, check_url, first_model
from pagemill.commands.chat import DEFAULT_URL

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water"
)
PERCENTILES = (50, 90, 99)
DEFAULT_CONCURRENCY = 8


@dataclass
class BenchSample:
    """One finished request; times in seconds."""

    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    prompt_tokens: int
    completion_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """The mean time per output token after the first; `None` for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass
class BenchLoad:
    """The load to send; `model` is set before the first request."""

    model: str
    num_requests: int
    concurrency: int
    rate_per_s: float | None
    max_seconds: float
    prompt_words: int
    output_tokens: int
    seed: int


@dataclass
class BenchOutcome:
    samples: list[BenchSample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_started: int = 0
    wall_s: float = 0.0


def bench(
    url: Annotated[str, typer.Option(help="URL of the gateway or engine to measure.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to request (default: the first one served).")] = None,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Number of requests to send.")] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Number of clients that send requests one after the other (default: 8)."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Mean number of requests per second, with Poisson arrivals (open loop), instead of --concurrency.",
        ),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Stop after this many seconds, even if requests are unfinished.")
    ] = 60,
    prompt_words: Annotated[
        int, typer.Option(min=1, max=100_000, help="Words in each prompt; all prompts are different.")
    ] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to generate per request.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed for the prompts and the arrival times.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="PAGEMILL_API_KEY", help="API key for the gateway (a bearer token).")
    ] = None,
    format: Annotated[
        Literal["table", "json"],
        typer.Option("--format", "-o", help="Output format: a table followed by a line of JSON, or the JSON alone."),
    ] = "table",
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Allow a --url on another machine. Measure only servers of your own."),
    ] = False,
) -> None:
    """Measure a running server; the last line of output is JSON."""
    try:
        _check_target(url, allow_remote)
        clients = _clients(concurrency, rate)
        load = BenchLoad(model or "", requests, clients, rate, max_seconds, prompt_words, output_tokens, seed)
        outcome = asyncio.run(_run(url, api_key, load))
        report = _report(load, outcome)
    except ClientError as error:
        typer.echo(f"pagemill bench: {error}", err=True)
        raise typer.Exit(1) from error
    if format == "table":
        typer.echo(_table(report))
    typer.echo(json.dumps(report))
    if outcome.errors:
        typer.echo(f"{len(outcome.errors)} requests failed; the first: {outcome.errors[0]}", err=True)
        raise typer.Exit(1)


def _clients(concurrency: int | None, rate: float | None) -> int:
    if concurrency is not None and rate is not None:
        raise ClientError(f"--concurrency {concurrency}: does not go with --rate {rate:g}; remove one of them.")
    return DEFAULT_CONCURRENCY if concurrency is None else concurrency


def _check_target(url: str, allow_remote: bool) -> None:
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


async def _run(url: str, api_key: str | None, load: BenchLoad) -> BenchOutcome:
    outcome = BenchOutcome()
    async with ChatClient(url, api_key=api_key) as client:
        load.model, _ = await first_model(client, load.model or None)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(load.max_seconds):
                await (_open_loop if load.rate_per_s else _closed_loop)(client, load, outcome)
        except TimeoutError:
            sys.stderr.write(f"stopped after {load.max_seconds:g} s (--max-seconds)\n")
        outcome.wall_s = time.perf_counter() - start
    return outcome


async def _closed_loop(client: ChatClient, load: BenchLoad, outcome: BenchOutcome) -> None:
    numbers = iter(range(load.num_requests))

    async def worker() -> None:
        for number in numbers:  # the workers share the iterator
            await _one(client, load, outcome, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.num_requests)):
            group.create_task(worker())


async def _open_loop(client: ChatClient, load: BenchLoad, outcome: BenchOutcome) -> None:
    assert load.rate_per_s is not None
    arrivals = random.Random(load.seed)
    async with asyncio.TaskGroup() as group:
        for number in range(load.num_requests):
            group.create_task(_one(client, load, outcome, number))
            await asyncio.sleep(arrivals.expovariate(load.rate_per_s))


async def _one(client: ChatClient, load: BenchLoad, outcome: BenchOutcome, number: int) -> None:
    """Send one request and add its sample, or its error, to the outcome."""
    outcome.num_started += 1
    messages = [{"role": "user", "content": prompt_text(load, number)}]
    params: dict[str, Any] = {"max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    arrivals: list[float] = []
    usage = (0, 0)
    try:
        async for piece in client.stream_chat(load.model, messages, **params):
            if piece.text or piece.reasoning or piece.finish_reason:
                arrivals.append(piece.at_s)
            if piece.completion_tokens is not None:
                usage = (piece.prompt_tokens or 0, piece.completion_tokens)
    except ClientError as error:
        outcome.errors.append(str(error))
        return
    if not arrivals:
        outcome.errors.append("The server ended the answer without any event.")
        return
    gaps = [late - early for early, late in itertools.pairwise(arrivals)]
    outcome.samples.append(BenchSample(arrivals[0] - start, arrivals[-1] - start, gaps, *usage))


def prompt_text(load: BenchLoad, number: int) -> str:
    """Return a prompt that depends on the seed and the request's number only, so that every run sends the same ones."""
    draw, words = random.Random(f"{load.seed}:{number}"), COMMON_WORDS.split()
    return " ".join(draw.choice(words) for _ in range(load.prompt_words))


def _report(load: BenchLoad, outcome: BenchOutcome) -> dict[str, Any]:
    samples = outcome.samples
    if not samples:
        first = outcome.errors[0] if outcome.errors else f"none finished within {load.max_seconds:g} s (--max-seconds)."
        raise ClientError(f"No request succeeded: {first}")
    tpots = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    return {
        "model": load.model,
        "requests": len(samples),
        "failed": len(outcome.errors),
        "unfinished": outcome.num_started - len(samples) - len(outcome.errors),
        "concurrency": None if load.rate_per_s else load.concurrency,
        "rate_per_s": load.rate_per_s,
        "wall_s": round(outcome.wall_s, 3),
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "output_tokens_per_s": round(sum(sample.completion_tokens for sample in samples) / outcome.wall_s, 1),
        "requests_per_s": round(len(samples) / outcome.wall_s, 3),
        "ttft_ms": percentiles([sample.ttft_s for sample in samples]),
        "tpot_ms": percentiles(tpots),
        "itl_ms": percentiles([gap for sample in samples for gap in sample.gaps_s]),
        "e2e_ms": percentiles([sample.e2e_s for sample in samples]),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the nearest-rank percentiles in milliseconds; empty if there are no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    ranks = {p: max(0, -(-p * len(ordered) // 100) - 1) for p in PERCENTILES}
    return {f"p{p}": round(ordered[rank] * 1000, 2) for p, rank in ranks.items()}


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['requests']} requests in {report['wall_s']} s: "
        f"{report['output_tokens_per_s']} output tokens/s, {report['requests_per_s']} requests/s",
        f"{'ms':8}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES),
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = report[f"{name}_ms"]
        lines.append(f"{name.upper():8}" + "".join(f"{values.get(f'p{p}', float('nan')):>10.1f}" for p in PERCENTILES))
    return "\n".join(lines)

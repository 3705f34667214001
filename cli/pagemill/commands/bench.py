"""`pagemill bench`: an online load against a running server, bounded in requests and in time.

Measures what a client sees: time to first token (TTFT), time per output token (TPOT), inter-token latency (ITL) and
throughput. Closed loop by default (a fixed number of clients); `--rate` makes it an open loop with Poisson arrivals,
which shows queueing honestly. Offline throughput and comparisons with other engines are in the repository's `bench/`.
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

from pagemill.client import Client, ClientError, check_url, first_model
from pagemill.commands.chat import DEFAULT_URL

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water"
)
PERCENTILES = (50, 90, 99)


@dataclass
class Sample:
    """One finished request; times in seconds."""

    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    prompt_tokens: int
    completion_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; `None` for a one-token answer."""
        if self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass
class Load:
    """What to send; shared by all workers and never changed."""

    model: str
    num_requests: int
    concurrency: int
    rate_per_s: float | None
    max_seconds: float
    prompt_words: int
    output_tokens: int
    seed: int


@dataclass
class Outcome:
    samples: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_started: int = 0
    wall_s: float = 0.0


def bench(
    url: Annotated[str, typer.Option(help="Gateway or engine to load.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name; by default the first one served.")] = None,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests to send at most.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Clients at the same time.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: mean arrivals per second (Poisson).")
    ] = None,
    max_seconds: Annotated[float, typer.Option(min=1, max=3600, help="Stop after this long, whatever is open.")] = 60,
    prompt_words: Annotated[int, typer.Option(min=1, max=100_000, help="Words of each (different) prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens of each answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="PAGEMILL_API_KEY", help="Bearer key of the gateway.")] = None,
    format: Annotated[
        Literal["table", "json"], typer.Option("--format", "-o", help="For people and programs, or JSON alone.")
    ] = "table",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Load a server on another machine: only one that is yours.")
    ] = False,
) -> None:
    """Measure a running server; the last line of output is JSON."""
    try:
        _check_target(url, allow_remote)
        load = Load(model or "", requests, concurrency, rate, max_seconds, prompt_words, output_tokens, seed)
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
        raise ClientError(f"--url names `{host or url}`, which is not this machine; add --allow-remote if it is yours.")


async def _run(url: str, api_key: str | None, load: Load) -> Outcome:
    outcome = Outcome()
    async with Client(url, api_key=api_key) as client:
        load.model, _ = await first_model(client, load.model or None)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(load.max_seconds):
                await (_open_loop if load.rate_per_s else _closed_loop)(client, load, outcome)
        except TimeoutError:
            sys.stderr.write(f"stopped after {load.max_seconds:g} s (--max-seconds)\n")
        outcome.wall_s = time.perf_counter() - start
    return outcome


async def _closed_loop(client: Client, load: Load, outcome: Outcome) -> None:
    numbers = iter(range(load.num_requests))

    async def worker() -> None:
        for number in numbers:  # shared: each worker takes the next one
            await _one(client, load, outcome, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.num_requests)):
            group.create_task(worker())


async def _open_loop(client: Client, load: Load, outcome: Outcome) -> None:
    assert load.rate_per_s is not None
    arrivals = random.Random(load.seed)
    async with asyncio.TaskGroup() as group:
        for number in range(load.num_requests):
            group.create_task(_one(client, load, outcome, number))
            await asyncio.sleep(arrivals.expovariate(load.rate_per_s))


async def _one(client: Client, load: Load, outcome: Outcome, number: int) -> None:
    """Send one request and keep its sample; a failure is counted, never hidden and never fatal to the others."""
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
    outcome.samples.append(Sample(arrivals[0] - start, arrivals[-1] - start, gaps, *usage))


def prompt_text(load: Load, number: int) -> str:
    """Words drawn from the seed and the request's number: the same in every run, different in every request."""
    draw, words = random.Random(f"{load.seed}:{number}"), COMMON_WORDS.split()
    return " ".join(draw.choice(words) for _ in range(load.prompt_words))


def _report(load: Load, outcome: Outcome) -> dict[str, Any]:
    samples = outcome.samples
    if not samples:
        first = outcome.errors[0] if outcome.errors else f"none finished within {load.max_seconds:g} s."
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
    """Nearest-rank percentiles in milliseconds; empty for no values."""
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

"""Measures the error of the time to the first token by which the gateway chooses, on real CPU engines, by load.

`pagemill up` serves the embedded model; chats with prompts of many lengths arrive as a Poisson process, streamed, in
three bands: shares of the rate that the same replicas sustained just before with all sequence slots taken. For each
request the gateway's control port reports the prediction at its sending and the measurement at its first token. Exits
with 1 if a band's median error exceeds `--limit`, or a request failed.

Each replica has one CPU. If there are fewer replicas than cores, each computes on one of the last cores alone, like a
pod with its own CPU; gateway and generator share the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
from local_replicas import Up, serving
from processes import give_cores
from report import emit, median, progress
from workload import MODEL

NAME = "smollm2"
BANDS = {"low": 0.25, "middle": 0.5, "high": 0.75}
"""Shares of the sustained rate."""
POLL_S = 2.0
MAX_SHOWN = 256
"""Number of decisions that the gateway keeps."""
DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model: {{source: "{model}", name: {name}}}
  engine: {{maxModelLen: 2048}}
  resources: {{gpus: 0, cpu: 1}}
  replicas: {replicas}
"""
WORDS = ("river", "stone", "light", "paper", "north", "glass", "seven", "garden", "engine", "quiet", "bridge", "salt")


class Decided(NamedTuple):
    predicted_ms: float
    measured_ms: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_in_flight: int
    """Requests in flight on the chosen replica."""

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


class Load:
    """Streams of chats whose answers are ignored."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._draw = random.Random(seed)
        self.num_done = 0
        self.faults: list[str] = []

    async def saturated(self, seconds: float, num_at_once: int) -> float:
        """Return the answered requests per second with `num_at_once` requests always in flight."""
        end = time.monotonic() + seconds
        before = self.num_done

        async def work() -> None:
            while time.monotonic() < end:
                await self._ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(work())
        return (self.num_done - before) / (time.monotonic() - end + seconds)

    async def poisson(self, seconds: float, rate_per_s: float) -> None:
        """Send requests as a Poisson process and wait for the last answer."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end:
                group.create_task(self._ask())
                await asyncio.sleep(self._draw.expovariate(rate_per_s))

    async def _ask(self) -> None:
        words = self._draw.choices(WORDS, k=min(600, 8 + int(self._draw.expovariate(1 / 90))))
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": self._draw.randint(8, 48),
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                self.faults.append(f"{response.status}: {(await response.text())[:200]}")
                return
            async for _ in response.content.iter_any():
                pass
        self.num_done += 1


class Decisions:
    """The decisions that the gateway's control port has reported so far, each once."""

    def __init__(self, session: aiohttp.ClientSession, control_url: str, control_token: str) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {control_token}"}
        self._url = f"{control_url}/debug/decisions?limit={MAX_SHOWN}"
        self._found: dict[int, Decided] = {}
        self._last = 0
        """Number of the latest decision that was taken."""

    async def watch(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(POLL_S)

    async def read(self) -> None:
        async with self._session.get(self._url, headers=self._headers) as response:
            for each in json.loads(await response.text())["decisions"]:
                measured_ms, predicted_ms = each["measured_ttft_ms"], each["predicted_ttft_ms"]
                if measured_ms and predicted_ms is not None:
                    chosen = each["candidates"][0]
                    self._found[each["decision"]] = Decided(
                        predicted_ms,
                        measured_ms,
                        each["prompt_tokens"],
                        chosen["cached_tokens"],
                        chosen["in_flight"],
                    )

    def take(self) -> list[Decided]:
        """Return all decisions since the last call."""
        taken = [each for number, each in self._found.items() if number > self._last]
        self._last = max(self._found, default=self._last)
        return taken


async def measure(up: Up, args: argparse.Namespace) -> tuple[dict[str, list[Decided]], float, list[str]]:
    assert up.url is not None
    assert up.metrics_url is not None
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(session, up.url, args.seed)
        decisions = Decisions(session, up.metrics_url.removesuffix("/metrics"), up.control_token)
        watching = asyncio.create_task(decisions.watch())
        try:
            rate_per_s = await load.saturated(args.calibrate, args.at_once * args.replicas)
            progress(f"{rate_per_s:.2f} requests/s with {args.at_once} under way on each replica")
            decisions.take()
            found = {}
            for band, share in BANDS.items():
                await load.poisson(args.seconds, share * rate_per_s)
                await decisions.read()
                found[band] = decisions.take()
                progress(f"{band}: {json.dumps(figures(found[band]))}")
        finally:
            watching.cancel()
    return found, rate_per_s, load.faults


def figures(decided: list[Decided]) -> dict[str, float]:
    sizes = sorted(abs(each.error) for each in decided)
    if not sizes:
        return {}
    return {
        "num_requests": len(decided),
        "ttft_p50_ms": median([each.measured_ms for each in decided]),
        "error_p50": median(sizes),
        "error_p90": sizes[len(sizes) * 9 // 10],
        "error_mean": sum(sizes) / len(sizes),
        "bias_mean": sum(each.error for each in decided) / len(decided),
        "bias_p50": median([each.error for each in decided]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each band in seconds")
    parser.add_argument(
        "--calibrate", type=float, default=20.0, help="seconds with all sequence slots taken, to find the rate"
    )
    parser.add_argument(
        "--at-once", type=int, default=8, help="requests in flight on each replica during the calibration"
    )
    parser.add_argument("--limit", type=float, default=0.15, help="largest median error of a band that passes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to which every request's prediction is written")
    args = parser.parse_args()
    with serving(DEPLOYMENT.format(name=NAME, model=MODEL, replicas=args.replicas), args.replicas) as (up, _):
        _give_cores(up)
        found, rate_per_s, faults = asyncio.run(measure(up, args))
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    report(found, rate_per_s, faults, args)


def report(found: dict[str, list[Decided]], rate_per_s: float, faults: list[str], args: argparse.Namespace) -> None:
    by_band = {band: figures(decided) for band, decided in found.items()}
    columns = ["load", *next(iter(by_band.values()))]
    rows = [
        [f"{band}, {BANDS[band] * rate_per_s:.2f} requests/s", *(f"{value:.3g}" for value in each.values())]
        for band, each in by_band.items()
    ]
    result: dict[str, Any] = {"replicas": args.replicas, "rate_per_s": rate_per_s, "figures": by_band}
    emit("prediction_on_engines", columns, rows, {**result, "num_failed": len(faults), "faults": faults[:3]})
    missed = [band for band, each in by_band.items() if each.get("error_p50", 1.0) > args.limit]
    if missed or faults:
        raise SystemExit(f"above {args.limit:.0%}: {', '.join(missed) or 'none'}; failed requests: {len(faults)}")


def _give_cores(up: Up) -> None:
    servers = [replica.pid for replica in up.replicas().values()]
    engines = {child.pid for server in servers for child in psutil.Process(server).children()}
    family = [up.process.pid, *(child.pid for child in psutil.Process(up.process.pid).children(recursive=True))]
    give_cores(servers, [os.getpid(), *(pid for pid in family if pid not in {*servers, *engines})])


if __name__ == "__main__":
    main()

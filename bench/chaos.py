"""Repeatedly kills one of three local replicas with SIGKILL during whole and streamed answers; no client may notice.

`pagemill up` serves the embedded model in float32 with `deterministic`, so that every text can be compared with that of
the undisturbed engine. The first kill measures how long a replica takes to be ready again under the same load; from
then on, for `--seconds`, the next replica in turn, or several at once, are killed at intervals of twice that time.
Exits with 1 if an answer failed, a stream was cut or a text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

from exact_load import EXACT_DEPLOYMENT, ExactLoad
from local_replicas import Replica, Up, serving
from report import emit, median, progress
from workload import MODEL

NAME = "smollm2"
NUM_REPLICAS = 3
RESTART_TIMEOUT_S = 180.0
POLL_S = 0.05


@dataclass
class Kills:
    """Kills of replicas, in turn."""

    up: Up
    restarts_s: list[float] = field(default_factory=list)
    """Seconds from each kill until the same replica was ready again."""
    num: int = 0
    num_missed: int = 0
    """Kills that were skipped because the replica was not ready yet."""
    _watchers: list[asyncio.Task[None]] = field(default_factory=list)

    async def kill(self, num_at_once: int) -> None:
        replicas = await asyncio.to_thread(self.up.replicas)
        for _ in range(num_at_once):
            await self._kill_next(replicas)

    async def _kill_next(self, replicas: dict[str, Replica]) -> None:
        """Kill the next replica if it is ready, and measure its restart in the background."""
        name = f"{NAME}-{(self.num + self.num_missed) % NUM_REPLICAS}"
        replica = replicas.get(name)
        if replica is None or not await asyncio.to_thread(lambda: replica.ready):
            self.num_missed += 1
            return
        replica.kill()
        self.num += 1
        progress(f"killed {name}")
        self._watchers.append(asyncio.create_task(self._watch(replica)))

    async def restarted(self) -> None:
        """Wait until all killed replicas are ready again."""
        await asyncio.gather(*self._watchers)

    async def _watch(self, killed: Replica) -> None:
        start = time.monotonic()
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            while not await asyncio.to_thread(self._is_back, killed):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        self.restarts_s.append(time.monotonic() - start)
        progress(f"{killed.name} is ready again after {self.restarts_s[-1]:.1f} s")

    def _is_back(self, killed: Replica) -> bool:
        now = self.up.replicas().get(killed.name)
        return now is not None and now.pid != killed.pid and now.ready


async def play(up: Up, url: str, args: argparse.Namespace) -> tuple[ExactLoad, Kills]:
    load = ExactLoad(url, NAME, args.workers, args.tokens)
    kills = Kills(up)
    try:
        await load.learn()
        progress("expected answers are known")
        running = asyncio.create_task(load.run())
        await kills.kill(args.at_once)
        await kills.restarted()
        end = time.monotonic() + args.seconds
        while time.monotonic() < end and not running.done():
            await kills.kill(args.at_once)
            await asyncio.sleep(args.every * kills.restarts_s[0])
        load.stop()
        await running
        await kills.restarted()
    finally:
        await load.close()
    return load, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--every", type=float, default=2.0, help="time from one kill to the next, as a multiple of the measured restart"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        choices=range(1, NUM_REPLICAS + 1),
        help="number of replicas to kill at a time",
    )
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens of every answer")
    args = parser.parse_args()
    document = EXACT_DEPLOYMENT.format(name=NAME, model=MODEL, replicas=NUM_REPLICAS)
    with serving(document, NUM_REPLICAS) as (up, url):
        load, kills = asyncio.run(play(up, url, args))
        continued = _continued(up)
    report(load, kills, continued)


def report(load: ExactLoad, kills: Kills, continued: dict[str, float]) -> None:
    counts = load.counts()
    ttfts_ms = sorted(each.ttft_s * 1000 for each in load.records if each.ttft_s is not None)
    result: dict[str, Any] = {
        "num_kills": kills.num,
        "num_missed": kills.num_missed,
        "restart_s": {"first": kills.restarts_s[0], "median": median(kills.restarts_s), "max": max(kills.restarts_s)},
        "outcomes": counts,
        "ttft_ms": {"p50": median(ttfts_ms), "max": ttfts_ms[-1]} if ttfts_ms else {},
        "continued": continued,
        "faults": [each._asdict() for each in load.faults[:5]],
    }
    emit("chaos", ["outcome", "answers"], sorted(counts.items()), result)
    if load.faults:
        raise SystemExit(f"{len(load.faults)} of {len(load.records)} answers are not as they were: {load.faults[0]}")


def _continued(up: Up) -> dict[str, float]:
    """Return the gateway's counters of retries and migrations."""
    found = re.findall(r"^pagemill_gateway_(\w*(?:migrat|retr)\w*_total)(\{.*\})? (\S+)$", up.metrics(), re.MULTILINE)
    return {f"{name}{labels}": float(value) for name, labels, value in found}


if __name__ == "__main__":
    main()

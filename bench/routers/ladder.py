"""Measures one contender: pods and generator started beside it, then rate after rate until it cannot hold one.

The router has one core to itself, pods and generator share the others. A run in which the generator sent too late, or
in which pods and generator filled their core, says nothing of the router: it is thrown away and repeated, and when that
does not help the ladder ends there without a verdict.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peers.install import FOLDER
from peers.process import PeerFailed, PeerProcess
from processes import tree_cpu_s, tree_memory
from report import ROOT

from routers import prompts
from routers.catalogue import DIRECT, KEY, MODEL, Router, Site

BENCH = ROOT / "bench"
START_TIMEOUT_S = 120.0
IDLE_S = 4.0
WARM_UP_RATE = 20.0
SETTLE_S = 2.0
"""Between the first answer and the warm-up: who registers its pods one by one is still at it."""
MAX_LAG_MS = 5.0
"""99th percentile of how late requests were sent."""
MAX_LOAD_SHARE = 0.95
"""Of their core, for pods and generator together."""
MAX_TTFT_P99_MS = 100.0
"""Beyond it a rate is not held: prefills take no time here, so this is all queueing."""
MAX_BACKLOG_S = 0.5
"""Longer than an answer takes by itself, from the last arrival to the last answer."""


class Size(NamedTuple):
    num_pods: int
    rates: tuple[float, ...]
    """Ascending."""
    seconds: float
    """Of one run."""
    num_tries: int = 3
    num_prompt_tokens: int = 200
    num_tokens: int = 32
    step_ms: float = 10.0

    @property
    def answer_s(self) -> float:
        """What an answer takes by itself."""
        return self.num_tokens * self.step_ms / 1000


FULL = Size(100, (50, 100, 200, 300, 400, 500, 700, 1000, 1400), seconds=8.0)
SMOKE = Size(4, (20, 40), seconds=2.0, num_tries=1)


class Cores(NamedTuple):
    router: int
    load: list[int]


def cores() -> Cores:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("the comparison needs two cores: one for the router, one for pods and load")
    return Cores(usable[0], usable[1:])


class Verdict(NamedTuple):
    valid: bool
    held: bool
    values: dict[str, Any]


@dataclass
class Stage:
    """Pods and generator, waiting for a router."""

    pods: PeerProcess
    generator: PeerProcess
    ports: list[int]
    bodies: Path
    size: Size
    num_sent: int = 0

    def load(self, ports: list[int], rate: float, seconds: float, num_requests: int = 0) -> dict[str, Any]:
        job = {
            "ports": ports,
            "path": "/v1/chat/completions",
            "headers": {"Authorization": f"Bearer {KEY}"},
            "bodies": str(self.bodies),
            "rate": rate,
            "seconds": seconds,
            "num_requests": num_requests,
            "num_tokens": self.size.num_tokens,
            "first": self.num_sent,
            "hold_s": self.size.answer_s,
        }
        report = self.generator.ask(job, timeout_s=seconds + num_requests / rate + self.size.answer_s + 60)
        self.num_sent += report["num_sent"]
        return report

    def cpu_s(self) -> float:
        return tree_cpu_s(self.pods.pid) + tree_cpu_s(self.generator.pid)


@contextmanager
def stage(size: Size, where: Cores, folder: Path) -> Iterator[Stage]:
    folder.mkdir(parents=True, exist_ok=True)
    bundle, bodies = folder / "bundle", folder / f"bodies-{size.num_prompt_tokens}-{size.num_tokens}.json"
    if not bodies.exists():
        bundle.write_bytes(prompts.bundle().to_bytes())
        prompts.write_bodies(bodies, MODEL, size.num_prompt_tokens, size.num_tokens)
    argv = [sys.executable, "-m", "routers.pods", "--pods", str(size.num_pods), "--model", MODEL]
    argv += ["--bundle", str(bundle), "--tokens", str(size.num_tokens), "--step-ms", str(size.step_ms)]
    environment = {"PYTHONPATH": os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])}
    pods = PeerProcess(pinned(argv, where.load), environment, folder / "pods.log")
    generator_argv = [sys.executable, "-m", "routers.generator"]
    generator = PeerProcess(pinned(generator_argv, where.load), environment, folder / "generator.log")
    try:
        ports = pods.answer(START_TIMEOUT_S)["ports"]
        yield Stage(pods, generator, ports, bodies, size)
    finally:
        generator.stop()
        pods.stop()


def pinned(argv: list[str], usable: list[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, usable)), *argv]


class Ladder:
    """Of one contender: `samples` by row, `idle` among them, until it holds a rate no longer."""

    def __init__(self, size: Size, where: Cores, folder: Path = FOLDER / "gateway") -> None:
        self._size = size
        self._where = where
        self._folder = folder

    def climb(self, router: Router | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows and their values as they are measured; `None`: no router. Raises `PeerFailed`."""
        with stage(self._size, self._where, self._folder) as around, self._started(router, around) as running:
            ports = [running.port] if running.process else around.ports
            _wait_answer(around, running, ports)
            time.sleep(SETTLE_S)
            _checked(around.load(ports, WARM_UP_RATE, self._size.seconds / 2))
            yield "idle", self._idle(running)
            for rate in self._size.rates:
                verdict = self._run(around, running, ports, rate)
                yield f"{rate:g}", verdict.values
                if not verdict.held:
                    return

    @contextmanager
    def _started(self, router: Router | None, around: Stage) -> Iterator[Running]:
        if router is None:
            yield Running(None, 0)
            return
        folder = self._folder / router.name
        max_streams = math.ceil(max(self._size.rates) * max(1.0, 4 * self._size.answer_s))
        start = router.start(Site(around.ports, folder, max_streams))
        argv = pinned(start.argv, [self._where.router])
        process = PeerProcess(argv, start.environment, folder / "log")
        try:
            yield Running(process, start.port)
        finally:
            process.stop()

    def _idle(self, running: Running) -> dict[str, Any]:
        """What it costs to know pods that do nothing."""
        if running.process is None:
            return {}
        before, start = tree_cpu_s(running.process.pid), time.perf_counter()
        time.sleep(IDLE_S)
        used = tree_cpu_s(running.process.pid) - before
        return {
            "cores": round(used / (time.perf_counter() - start), 4),
            "pss_mib": round(tree_memory(running.process.pid).pss_mib, 1),
        }

    def _run(self, around: Stage, running: Running, ports: list[int], rate: float) -> Verdict:
        for _ in range(self._size.num_tries):
            verdict = judge(self._measure(around, running, ports, rate), self._size)
            if verdict.valid:
                break
        return verdict

    def _measure(self, around: Stage, running: Running, ports: list[int], rate: float) -> dict[str, Any]:
        pid = running.process.pid if running.process else None
        start, load_before = time.perf_counter(), around.cpu_s()
        before = tree_cpu_s(pid) if pid else 0.0
        report = around.load(ports, rate, self._size.seconds)
        used = tree_cpu_s(pid) - before if pid else 0.0
        seconds = time.perf_counter() - start
        return {
            **report,
            "cpu_ms": used * 1000 / max(1, report["num_done"]),
            "router_share": used / seconds,
            "load_share": (around.cpu_s() - load_before) / seconds / len(self._where.load),
        }


class Running(NamedTuple):
    process: PeerProcess | None
    port: int


def judge(values: dict[str, Any], size: Size) -> Verdict:
    """Whether a run says something of the router, and whether that held the rate."""
    lagged = values["lag_ms"]["p99"] > MAX_LAG_MS or values["load_share"] > MAX_LOAD_SHARE
    complete = values["num_done"] == values["num_sent"]
    backlog_s = values["whole_s"] - values["sent_s"] - size.answer_s
    prompt = complete and values["ttft_ms"]["p99"] <= MAX_TTFT_P99_MS and backlog_s <= MAX_BACKLOG_S
    return Verdict(not lagged, prompt and not lagged, {**values, "lagged": lagged, "held": prompt and not lagged})


def _wait_answer(around: Stage, running: Running, ports: list[int]) -> None:
    """Until one request is answered in full."""
    deadline = time.perf_counter() + START_TIMEOUT_S
    while True:
        report = around.load(ports, 1.0, 0.0, num_requests=1)
        if report["num_done"]:
            return
        if running.process is not None and running.process.ended:
            raise PeerFailed(running.process.why_ended())
        if time.perf_counter() > deadline:
            raise PeerFailed(f"no answer after {START_TIMEOUT_S:.0f} s: {json.dumps(report['causes'])[:160]}")
        time.sleep(0.2)


def _checked(report: dict[str, Any]) -> None:
    if report["num_done"] < report["num_sent"]:
        raise PeerFailed(f"of {report['num_sent']} requests failed: {json.dumps(report['causes'])[:160]}")


def name_of(router: Router | None) -> str:
    return DIRECT if router is None else router.name

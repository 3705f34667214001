"""Starts the processes of a measurement: pods and load generator on their cores, the router on its own.

`ladder` and the commands decide what to send and how to judge it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peers.install import FOLDER as PEERS_FOLDER
from peers.process import PeerFailed, PeerProcess
from processes import tree_cpu_s
from report import ROOT

from routers import prompts
from routers.catalogue import DIRECT, KEY, MODEL, Router, Site

BENCH = ROOT / "bench"
FOLDER = PEERS_FOLDER / "gateway"
START_TIMEOUT_S = 120.0
FIRST_ANSWER_TIMEOUT_S = 120.0
ASK_MARGIN_S = 60.0
POLL_S = 0.2


class Scene(NamedTuple):
    """The settings of a measurement."""

    num_pods: int
    max_streams: int
    """Most streams that are open at the same time."""
    num_tokens: int = 32
    """Tokens of an answer, one event each."""
    step_ms: float = 10.0
    """Milliseconds between two tokens."""
    num_prompt_tokens: int = 200
    patience_s: float = 20.0
    """Seconds to wait for an answer after the last request, in addition to its own duration."""
    pod_options: tuple[str, ...] = ()
    """Additional options of `routers.pods`."""

    @property
    def answer_s(self) -> float:
        """Return the duration of an answer without queueing, in seconds."""
        return self.num_tokens * self.step_ms / 1000


class Cores(NamedTuple):
    router: int
    load: list[int]
    more: tuple[int, ...] = ()
    """Additional cores of a router with several workers or threads."""
    num_lacking: int = 0
    """Number of cores that the router lacks, because the machine has fewer or the load uses them too."""


def cores(num_of_router: int = 1) -> Cores:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("the comparison needs two cores: one for the router, one for pods and load")
    router, *more = usable[:num_of_router]
    num_lacking = max(0, num_of_router + 1 - len(usable))
    return Cores(router, usable[num_of_router:] or usable[-1:], tuple(more), num_lacking)


class Running(NamedTuple):
    """A running router, or no process when requests go directly to the pods."""

    process: PeerProcess | None
    ports: list[int]
    """The ports to which requests are sent."""

    def cpu_s(self) -> float:
        return tree_cpu_s(self.process.pid) if self.process else 0.0


@dataclass
class Stage:
    """Pods and load generator."""

    scene: Scene
    where: Cores
    pods: PeerProcess
    generator: PeerProcess
    ports: list[int]
    bodies: Path
    num_sent: int = 0

    def load(self, ports: list[int], rate: float, *, seconds: float = 0.0, num_requests: int = 0) -> dict[str, Any]:
        """Send requests for a time or a number of requests. Return the generator's report."""
        job = {
            "ports": ports,
            "path": "/v1/chat/completions",
            "headers": {"Authorization": f"Bearer {KEY}"},
            "bodies": str(self.bodies),
            "rate": rate,
            "seconds": seconds,
            "num_requests": num_requests,
            "num_tokens": self.scene.num_tokens,
            "first": self.num_sent,
            "hold_s": self.scene.answer_s,
            "patience_s": self.scene.patience_s,
        }
        limit_s = seconds + num_requests / rate + self.scene.answer_s + self.scene.patience_s
        report = self.generator.ask(job, limit_s + ASK_MARGIN_S)
        self.num_sent += report["num_sent"]
        return report

    def cpu_s(self) -> float:
        return tree_cpu_s(self.pods.pid) + tree_cpu_s(self.generator.pid)


@contextmanager
def stage(scene: Scene, where: Cores) -> Iterator[Stage]:
    allow_files(2 * scene.max_streams + 1024)
    bundle, bodies = _files(scene)
    argv = [sys.executable, "-m", "routers.pods", "--pods", str(scene.num_pods), "--model", MODEL]
    argv += ["--bundle", str(bundle), "--tokens", str(scene.num_tokens), "--step-ms", str(scene.step_ms)]
    argv += scene.pod_options
    environment = {"PYTHONPATH": os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])}
    pods = PeerProcess(pinned(argv, where.load), environment, FOLDER / "pods.log")
    argv = [sys.executable, "-m", "routers.generator"]
    generator = PeerProcess(pinned(argv, where.load), environment, FOLDER / "generator.log")
    try:
        ports = pods.answer(START_TIMEOUT_S)["ports"]
        yield Stage(scene, where, pods, generator, ports, bodies)
    finally:
        generator.stop()
        pods.stop()


@contextmanager
def started(router: Router | None, around: Stage) -> Iterator[Running]:
    """Yield a router that has answered once; `None` means no router. Raises `PeerFailed`."""
    if router is None:
        yield Running(None, around.ports)
        return
    folder = FOLDER / router.name
    start = router.start(Site(around.ports, folder, around.scene.max_streams))
    usable = [around.where.router, *around.where.more]
    process = PeerProcess(pinned(start.argv, usable), start.environment, folder / "log")
    running = Running(process, [start.port])
    try:
        _wait_answer(around, running)
        yield running
    finally:
        process.stop()


def name_of(router: Router | None) -> str:
    return DIRECT if router is None else router.name


def allow_files(wanted: int) -> None:
    """Allow this process and its children to open this many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < wanted:
        raise SystemExit(f"{wanted} open files are needed and at most {hard} allowed; raise the limit (`ulimit -Hn`)")
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _files(scene: Scene) -> tuple[Path, Path]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    bundle, bodies = FOLDER / "bundle", FOLDER / f"bodies-{scene.num_prompt_tokens}-{scene.num_tokens}.json"
    bundle.write_bytes(prompts.bundle().to_bytes())
    if not bodies.exists():
        prompts.write_bodies(bodies, MODEL, scene.num_prompt_tokens, scene.num_tokens)
    return bundle, bodies


def pinned(argv: list[str], usable: list[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, usable)), *argv]


def _wait_answer(around: Stage, running: Running) -> None:
    """Wait until one request is answered completely."""
    deadline = time.perf_counter() + FIRST_ANSWER_TIMEOUT_S
    while True:
        report = around.load(running.ports, 1.0, num_requests=1)
        if report["num_done"]:
            return
        if running.process is not None and running.process.ended:
            raise PeerFailed(running.process.why_ended())
        if time.perf_counter() > deadline:
            raise PeerFailed(f"no answer after {FIRST_ANSWER_TIMEOUT_S:.0f} s: {json.dumps(report['causes'])[:160]}")
        time.sleep(POLL_S)

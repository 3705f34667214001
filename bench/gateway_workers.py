"""Compares several workers of one gateway with several gateways: CPU per request and for the pods, memory, balance.

The contenders are a gateway with one process, one with two workers, and two gateways that clients use in turn, each
with all features, on one core. Pods report like busy ones (`gateway_pods`). CPU is the kernel's count for the gateways'
processes. Rounds take the contenders in turn.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from gateway_pods import Size, busy_options
from peers.process import PeerFailed, PeerProcess
from processes import tree_cpu_s, tree_memory
from report import emit, median
from routers.catalogue import Site, start_pagemill
from routers.stage import FIRST_ANSWER_TIMEOUT_S, FOLDER, Scene, Stage, cores, pinned, stage

SETTLE_S = 3.0
PODS = Size(20, 0.0, 2048, 256, 20.0, 4, 0, 0)


class Contender(NamedTuple):
    name: str
    num_gateways: int
    num_workers: int


CONTENDERS = (
    Contender("one process", 1, 1),
    Contender("two workers", 1, 2),
    Contender("two gateways", 2, 1),
)


class Group(NamedTuple):
    processes: list[PeerProcess]
    ports: list[int]

    def cpu_s(self) -> float:
        return sum(tree_cpu_s(process.pid) for process in self.processes)

    def memory_mib(self) -> float:
        return sum(tree_memory(process.pid).pss_mib for process in self.processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=PODS.num_pods)
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 100.0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    found: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in CONTENDERS}
    for _ in range(args.rounds):
        for contender in CONTENDERS:
            found[contender.name].append(measure(contender, args.pods, args.rates, args.seconds))
    names = list(found["one process"][0])
    values = {name: {key: median([each[key] for each in rounds]) for key in names} for name, rounds in found.items()}
    emit("gateway_workers", ["", *names], [[name, *each.values()] for name, each in values.items()], {"rounds": found})


def measure(contender: Contender, num_pods: int, rates: list[float], seconds: float) -> dict[str, float]:
    scene = Scene(num_pods, int(4 * max(rates)), pod_options=busy_options(PODS._replace(num_pods=num_pods)))
    with stage(scene, cores()) as around, _started(contender, around) as group:
        time.sleep(SETTLE_S)
        before, start = group.cpu_s(), time.perf_counter()
        time.sleep(seconds)
        pods_cores = (group.cpu_s() - before) / (time.perf_counter() - start)
        values = {"cores for the pods": round(pods_cores, 3), "PSS MiB": round(group.memory_mib(), 1)}
        for rate in rates:
            before, start = group.cpu_s(), time.perf_counter()
            report = around.load(group.ports, rate, seconds=seconds)
            used = group.cpu_s() - before - pods_cores * (time.perf_counter() - start)
            if report["num_done"] < report["num_sent"]:
                raise PeerFailed(f"{contender.name}, {rate:g}/s: {json.dumps(report['causes'])[:160]}")
            values[f"ms a request at {rate:g}/s"] = round(used * 1000 / report["num_done"], 2)
            values[f"TTFT p50 ms at {rate:g}/s"] = round(report["ttft_ms"]["p50"], 2)
            values[f"TTFT p99 ms at {rate:g}/s"] = round(report["ttft_ms"]["p99"], 2)
    return values


@contextmanager
def _started(contender: Contender, around: Stage) -> Iterator[Group]:
    folder = FOLDER / "workers"
    group = Group([], [])
    with ExitStack() as stack:
        for number in range(contender.num_gateways):
            site = Site(around.ports, folder / str(number), around.scene.max_streams)
            start = start_pagemill(site, changes={"workers": contender.num_workers})
            process = PeerProcess(pinned(start.argv, [around.where.router]), start.environment, site.folder / "log")
            stack.callback(process.stop)
            group.processes.append(process)
            group.ports.append(start.port)
        _wait_answers(group, around)
        yield group


def _wait_answers(group: Group, around: Stage) -> None:
    deadline = time.perf_counter() + FIRST_ANSWER_TIMEOUT_S
    waiting = list(group.ports)
    while waiting:
        if around.load(waiting[:1], 1.0, num_requests=1)["num_done"]:
            waiting.pop(0)
        elif time.perf_counter() > deadline:
            raise PeerFailed(f"no answer on port {waiting[0]} after {FIRST_ANSWER_TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    main()

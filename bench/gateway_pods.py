"""Measures the CPU that a gateway needs to follow 100 idle or busy pods, and how soon it knows them after a restart.

The only requests are those that time the restart. Idle pods send one state frame per second. Busy pods report every
step of a full batch, with the prefix chunks that it added and evicted, in at most 20 frames per second, from prefix
caches with 8,192 prefix chunks. CPU is the kernel's count for the gateway's processes. A restart is SIGKILL and a new
process with the same settings; the benchmark measures the times until its first answer and until it knows every pod and
all of their prefix chunks. The exit code is 1 if a goal is missed although the machine gave the pods enough time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from peers.process import PeerFailed, PeerProcess
from processes import tree_cpu_s, tree_memory
from report import emit, median
from routers.catalogue import KEY, MODEL, Site, Start, start_pagemill
from routers.stage import FOLDER, Scene, Stage, cores, pinned, stage

GOALS = {"idle": 0.1, "busy": 0.3}
"""The most cores that following the pods may take."""
WHOLE_GOAL_S = 3.0
MAX_PODS_SHARE = 0.9
"""Share of the pods' core above which they send fewer frames than they should."""
BLOCKS_OF_ROWS = 8192
"""KV blocks of a pod; its reported running requests use fewer."""
SETTLE_S = 3.0
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
ASK_PAUSE_S = 0.01
LOOK_PAUSE_S = 0.1


class Size(NamedTuple):
    num_pods: int
    seconds: float
    num_prefix_chunks: int
    num_shared: int
    steps_per_s: float
    churn: int
    num_restarts: int
    num_workers: int

    @property
    def num_distinct(self) -> int:
        """Return the number of prefix chunks in the table of a gateway that knows all pods."""
        return self.num_pods * (self.num_prefix_chunks - self.num_shared) + self.num_shared


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    size = _size()
    found: dict[str, dict[str, Any]] = {}
    found["idle"] = measure(size, 0, ())
    found["busy"] = measure(size, size.num_distinct, busy_options(size))
    columns = ["pods", "frames/s", "gateway cores", "gateway MiB", "first answer s", "(CPU)", "whole s", "(CPU)"]
    rows = [[name, *_cells(values)] for name, values in found.items()]
    emit("gateway_pods", columns, rows, {"size": size._asdict(), **found})
    beyond = [fault for name, values in found.items() for fault in faults(name, values)]
    if beyond:
        raise SystemExit("; ".join(beyond))


def measure(size: Size, num_prefix_chunks: int, options: tuple[str, ...]) -> dict[str, Any]:
    """Measure one state of the pods. `num_prefix_chunks`: the prefix chunks that the gateway must learn."""
    scene = Scene(size.num_pods, 16, num_tokens=1, pod_options=options)
    folder = FOLDER / "pods"
    with stage(scene, cores()) as around:
        start = start_pagemill(Site(around.ports, folder, 16), changes={"workers": size.num_workers})
        gateway = _begin(start, around)
        try:
            _restart_times(gateway, start, size.num_pods, num_prefix_chunks)
            time.sleep(SETTLE_S)
            cost = _cost(gateway, around, size.seconds)
            restarts = []
            for _ in range(size.num_restarts):
                gateway.kill()
                gateway = _begin(start, around)
                restarts.append(_restart_times(gateway, start, size.num_pods, num_prefix_chunks))
        finally:
            gateway.stop()
    return {**cost, "restarts": restarts}


def faults(name: str, values: dict[str, Any]) -> list[str]:
    """Return the goals that were missed."""
    if values["pods_cores"] > MAX_PODS_SHARE:
        return [f"{name}: the pods took {values['pods_cores']:.2f} of their core, so their frames came late"]
    missed = []
    if values["cores"] > GOALS[name]:
        missed.append(f"{name}: {values['cores']:.3f} cores, the goal is {GOALS[name]}")
    late = [each["whole_s"] for each in values["restarts"] if each["whole_s"] > WHOLE_GOAL_S]
    return missed + [f"{name}: whole after {each:.1f} s, the goal is {WHOLE_GOAL_S:.0f}" for each in late[:1]]


def busy_options(size: Size) -> tuple[str, ...]:
    options = {
        "prefix-chunks": size.num_prefix_chunks,
        "shared-prefix-chunks": size.num_shared,
        "steps-per-s": size.steps_per_s,
        "churn": size.churn,
        "blocks": BLOCKS_OF_ROWS + 4 * size.num_prefix_chunks,
    }
    return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))


def is_complete(metrics: str, num_pods: int, num_prefix_chunks: int) -> bool:
    """Whether a gateway with this status knows every pod and all of their prefix chunks."""
    pods = re.search(r'^pagemill_gateway_endpoints\{[^}]*phase="ready"[^}]*\} (\S+)$', metrics, re.MULTILINE)
    prefix_chunks = re.search(r"^pagemill_gateway_prefix_chunks (\S+)$", metrics, re.MULTILINE)
    if pods is None or prefix_chunks is None:
        return False
    return float(pods[1]) == num_pods and float(prefix_chunks[1]) == num_prefix_chunks


def _begin(start: Start, around: Stage) -> PeerProcess:
    return PeerProcess(pinned(start.argv, [around.where.router]), start.environment, FOLDER / "pods" / "log")


def _cost(gateway: PeerProcess, around: Stage, seconds: float) -> dict[str, Any]:
    start, before, pods_before = time.perf_counter(), tree_cpu_s(gateway.pid), tree_cpu_s(around.pods.pid)
    num_frames = -_num_frames(around)
    time.sleep(seconds)
    num_frames += _num_frames(around)
    used, pods_used = tree_cpu_s(gateway.pid) - before, tree_cpu_s(around.pods.pid) - pods_before
    took_s = time.perf_counter() - start
    return {
        "cores": round(used / took_s, 4),
        "pods_cores": round(pods_used / took_s, 4),
        "frames_per_s": round(num_frames / took_s, 1),
        "pss_mib": round(tree_memory(gateway.pid).pss_mib, 1),
    }


def _num_frames(around: Stage) -> int:
    os.kill(around.pods.pid, signal.SIGUSR1)
    count: int = around.pods.answer(ANSWER_TIMEOUT_S)["num_frames"]
    return count


def _restart_times(gateway: PeerProcess, start: Start, num_pods: int, num_prefix_chunks: int) -> dict[str, float]:
    """Return the times of a restart in seconds since the start of the process."""
    times: dict[str, float] = {}
    while not _answers(start.port):
        _check(gateway)
        time.sleep(ASK_PAUSE_S)
    times |= {
        "first_answer_s": round(time.perf_counter() - gateway.started_s, 3),
        "first_answer_cpu_s": tree_cpu_s(gateway.pid),
    }
    while not is_complete(_metrics(start.control_port), num_pods, num_prefix_chunks):
        _check(gateway)
        time.sleep(LOOK_PAUSE_S)
    times |= _since_start("whole", gateway)
    return times


def _since_start(what: str, gateway: PeerProcess) -> dict[str, float]:
    took_s = time.perf_counter() - gateway.started_s
    return {f"{what}_s": round(took_s, 3), f"{what}_cpu_s": round(tree_cpu_s(gateway.pid), 2)}


def _check(gateway: PeerProcess) -> None:
    if gateway.ended:
        raise PeerFailed(gateway.why_ended())
    if time.perf_counter() - gateway.started_s > START_TIMEOUT_S:
        raise PeerFailed(f"not whole after {START_TIMEOUT_S:.0f} s")


def _answers(port: int) -> bool:
    """Whether a short chat is answered."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status == 200 and b"data: [DONE]" in response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _metrics(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text: bytes = response.read()
            return text.decode()
    except (urllib.error.URLError, OSError):
        return ""


def _cells(values: dict[str, Any]) -> list[Any]:
    keys = ("first_answer_s", "first_answer_cpu_s", "whole_s", "whole_cpu_s")
    times = [median([each[key] for each in values["restarts"]]) for key in keys]
    return [values["frames_per_s"], f"{values['cores']:.3f}", values["pss_mib"], *times]


def _size() -> Size:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds of counting CPU, for idle and for busy pods"
    )
    parser.add_argument(
        "--prefix-chunks", type=int, default=8192, help="number of prefix chunks in each busy pod's prefix cache"
    )
    parser.add_argument(
        "--shared-prefix-chunks",
        type=int,
        default=1024,
        help="number of these prefix chunks that are the same in all pods",
    )
    parser.add_argument("--steps-per-s", type=float, default=32.0, help="steps per second of a busy pod")
    parser.add_argument("--churn", type=int, default=4, help="number of prefix chunks that each step adds and evicts")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    return Size(
        args.pods,
        args.seconds,
        args.prefix_chunks,
        args.shared_prefix_chunks,
        args.steps_per_s,
        args.churn,
        max(1, args.restarts),
        args.workers,
    )


if __name__ == "__main__":
    main()

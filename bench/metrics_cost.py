"""Measures the cost of a gateway's metrics and traces: a scrape with 100 known pods, and the share of a request's CPU.

The gateway has sent requests to every pod, so that each pod has all of its series. The share is the CPU time of a
streamed request's calls, measured in a loop, and of spans with their export at 200 requests per second, times 200
requests per second. Exits with 1 if a goal is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import multiprocessing
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from gateway_pods import is_complete
from peers.process import PeerProcess
from processes import tree_cpu_s
from report import emit, median
from routers.catalogue import MODEL, Site, start_pagemill
from routers.stage import FOLDER, Scene, cores, pinned, stage

from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.spans import write_spans
from pagemill_protocol.errors import unavailable
from pagemill_protocol.request.generate import Usage
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_routing.brain.interface import Assignment
from pagemill_servers.tracing.config import TracingConfig
from pagemill_servers.tracing.tracing import open_tracing

SCRAPE_GOAL_MS = 50.0
SHARE_GOAL = 0.01
OUTCOME_GOAL_US = 10.0
REQUESTS_PER_S = 200
START_LIMIT_S = 60.0
SAMPLED = (0.01, 0.1, 1.0)
ACCEPTED = {"text": "text/plain", "OpenMetrics": "application/openmetrics-text;version=1.0.0"}
ASSIGNMENT = Assignment(
    1, "pod-1", "http://pod-1", "token", "Cost", believed=True, predicted_cached_tokens=32, predicted_ttft_ms=20.0
)
SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started processes are ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--scrapes", type=int, default=40)
    parser.add_argument("--requests", type=int, default=20_000, help="number of requests in each loop of calls")
    parser.add_argument(
        "--traced", type=int, default=1_000, help=f"number of requests in each run of traces, at {REQUESTS_PER_S}/s"
    )
    args = parser.parse_args()
    scrapes = measure_scrapes(args.pods, args.scrapes)
    calls = {"metrics": metrics_us(args.requests), "end of a failed request": outcome_us(args.requests)}
    without = traces_cost(args.traced, None)
    for ratio in SAMPLED:
        cost = traces_cost(args.traced, ratio)
        calls[f"traces of {ratio:.0%}"] = cost.all_us - without.all_us
        calls[f"traces of {ratio:.0%}, serving thread"] = cost.caller_us - without.caller_us
    shares = {name: micros * REQUESTS_PER_S / 1e6 for name, micros in calls.items()}
    rows: list[list[Any]] = [
        [f"scrape, {name}", f"{each['ms']:.1f} ms", f"{each['series']} series"] for name, each in scrapes.items()
    ]
    rows += [[name, f"{calls[name]:.0f} us", f"{share:.2%} at {REQUESTS_PER_S}/s"] for name, share in shares.items()]
    emit("metrics_cost", ["what", "time", "share or size"], rows, {"scrapes": scrapes, "us": calls, "shares": shares})
    slow = [name for name, each in scrapes.items() if each["ms"] > SCRAPE_GOAL_MS]
    outcome = calls["end of a failed request"]
    if slow or shares["metrics"] > SHARE_GOAL or outcome > OUTCOME_GOAL_US:
        raise SystemExit(f"beyond a goal: scrapes {slow}, share {shares['metrics']:.2%}, outcome {outcome:.1f} us")


def measure_scrapes(num_pods: int, num_scrapes: int) -> dict[str, dict[str, float]]:
    """Return the wall time of a scrape by format, for an idle gateway."""
    folder = FOLDER / "scrape"
    with stage(Scene(num_pods, 64, num_tokens=4), cores()) as around:
        start = start_pagemill(Site(around.ports, folder, 64))
        gateway = PeerProcess(pinned(start.argv, [around.where.router]), start.environment, folder / "log")
        try:
            deadline_s = time.monotonic() + START_LIMIT_S
            while not is_complete(_scrape(start.control_port, "text/plain")[1], num_pods, 0):
                if gateway.ended or time.monotonic() > deadline_s:
                    raise SystemExit(f"the gateway does not know its pods: {gateway.why_ended()}")
                time.sleep(0.1)
            around.load([start.port], 100.0, num_requests=10 * num_pods)
            return {
                name: _scrapes(partial(_scrape, start.control_port, accept), num_scrapes, gateway.pid)
                for name, accept in ACCEPTED.items()
            }
        finally:
            gateway.stop()


def _scrapes(scrape: Callable[[], tuple[float, str]], count: int, pid: int) -> dict[str, float]:
    before = tree_cpu_s(pid)
    times, texts = zip(*(scrape() for _ in range(count)), strict=True)
    lines = [line for line in texts[-1].splitlines() if line and not line.startswith("#")]
    return {
        "ms": round(1000 * median(list(times)), 2),
        "worst_ms": round(1000 * max(times), 2),
        "cpu_ms": round(1000 * (tree_cpu_s(pid) - before) / count, 2),
        "series": len(lines),
        "bytes": len(texts[-1]),
    }


def _scrape(port: int, accept: str) -> tuple[float, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    began_s = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return time.perf_counter() - began_s, response.read().decode()
    except OSError:
        return 0.0, ""


def metrics_us(count: int) -> float:
    """Return the CPU microseconds of recording all metrics of one streamed request."""
    metrics = WorkerMetrics()

    def measure() -> None:
        record = _record()
        metrics.reserved(0.0001)
        metrics.prepared(record)
        metrics.routed(MODEL, ASSIGNMENT, 0.0002)
        metrics.first_token(MODEL, ASSIGNMENT, 0.02)
        metrics.cached(MODEL, ASSIGNMENT, 32)
        metrics.attempt(MODEL, "served")
        metrics.tenant_used("bench", "tiny", 200, 32)
        metrics.finished(record)

    return _cpu_us(measure, count) - _cpu_us(_record, count)


def outcome_us(count: int) -> float:
    """Return the CPU microseconds of finding and counting the outcome of a failed stream of a tenant with an objective:
    no other request is counted in more series.
    """
    metrics, error = WorkerMetrics(), unavailable("Too many.", code="queue_full")

    def ended() -> RequestRecord:
        record = _record()
        record.prepare_s, record.tenant, record.allowed_failures, record.num_delivered = None, "bench", 0.01, 1
        return record

    def measure() -> None:
        record = ended()
        record.failed(error)
        metrics.finished(record)

    return _cpu_us(measure, count) - _cpu_us(ended, count)


class TraceCost(NamedTuple):
    """CPU time per request, in microseconds."""

    all_us: float
    """Time of all threads: spans and their export."""
    caller_us: float
    """Time of the thread that serves requests."""


def traces_cost(count: int, ratio: float | None) -> TraceCost:
    """Return the cost of requests at the stated rate, of which the share `ratio` is sampled; None: without traces."""
    with _receiver() as url:
        config = None if ratio is None else TracingConfig(endpoint=url, sample_ratio=ratio)
        traces = open_tracing(config)
        began_s, caller_s = time.process_time(), 0.0
        for _ in range(count):
            record = _record()
            called_s = time.thread_time()
            traces.finished(SCOPE, partial(write_spans, record, "POST", time.monotonic()))
            caller_s += time.thread_time() - called_s
            time.sleep(1 / REQUESTS_PER_S)
        asyncio.run(traces.close())
        return TraceCost(1e6 * (time.process_time() - began_s) / count, 1e6 * caller_s / count)


def _cpu_us(call: Callable[[], Any], count: int) -> float:
    """Return the CPU microseconds of a call, over all threads of this process."""
    began_s = time.process_time()
    for _ in range(count):
        call()
    return 1e6 * (time.process_time() - began_s) / count


def _record() -> RequestRecord:
    record = RequestRecord("/v1/chat/completions", request_id="bench", model=MODEL, deployment="default/bench")
    record.stream, record.status, record.prepare_s = True, 200, 0.002
    record.sampling, record.prompt_tokens = SamplingParams(max_tokens=32), 200
    record.usage = Usage(prompt_tokens=200, completion_tokens=32, cached_tokens=32)
    attempt = record.chosen(ASSIGNMENT)
    attempt.first_token_at = record.first_frame_at = attempt.started_at
    attempt.ended("served")
    return record


@contextmanager
def _receiver() -> Iterator[str]:
    """Run a receiver that discards spans, in a process of its own; yield its URL."""
    found: multiprocessing.Queue[int] = multiprocessing.Queue()
    process = multiprocessing.Process(target=_receive, args=(found,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{found.get(timeout=START_LIMIT_S)}/v1/traces"
    finally:
        process.terminate()
        process.join()


def _receive(found: multiprocessing.Queue[int]) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.put(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    main()

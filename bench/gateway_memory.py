"""Measures whether a gateway's memory grows under equal load: its resident memory each minute, between the requests.

What is bounded is filled before the first minute: as many connections as may stream at once, the hashes of prompts
(65,536 chunks of 0.5 KB, whose table takes its last 2.5 MiB after 29,200 new prompts of three chunks), tokenized
segments and the index of prefixes. Then each minute has the same number of requests at the same rate, and a pause in
which all of them have ended. The figures to compare are those after half of the time and at its end.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from processes import tree_memory
from report import emit, progress
from routers.catalogue import OURS, routers
from routers.stage import Scene, cores, stage, started

NUM_PODS = 4
MAX_STREAMS = 256
PAUSE_S = 6.0
"""Longer than the period at which a process returns freed memory to the system."""
NUM_FILLING, FILLING_RATE = 33_000, 200.0
"""The requests that fill caches, and how many a second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--equal-prompts", action="store_true", help="send the prompts of the first minute each minute")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    num_requests = int(args.rate * (60 - PAUSE_S))
    found_mib: list[float] = []
    scene = Scene(num_pods=NUM_PODS, max_streams=MAX_STREAMS)
    with stage(scene, cores()) as around, started(routers()[OURS], around) as running:
        assert running.process is not None
        around.load(running.ports, 100.0 * MAX_STREAMS, num_requests=MAX_STREAMS)
        first = around.num_sent
        for _ in range(1 if args.equal_prompts else NUM_FILLING // num_requests + 1):
            around.load(running.ports, FILLING_RATE, num_requests=num_requests)
        for minute in range(1, args.minutes + 1):
            around.num_sent = first if args.equal_prompts else around.num_sent
            report = around.load(running.ports, args.rate, num_requests=num_requests)
            assert report["num_done"] == num_requests, report["causes"]
            time.sleep(PAUSE_S)
            found_mib.append(tree_memory(running.process.pid).rss_mib)
            progress(f"minute {minute}: {found_mib[-1]:.2f} MiB")
    half = len(found_mib) // 2
    rows = [[minute, mib] for minute, mib in enumerate(found_mib, start=1)]
    growth_mib = found_mib[-1] - found_mib[half - 1]
    emit(
        "gateway_memory",
        ["minute", "MiB"],
        rows,
        {"rate": args.rate, "equal_prompts": args.equal_prompts, "mib": found_mib, "growth_mib": growth_mib},
    )


if __name__ == "__main__":
    main()

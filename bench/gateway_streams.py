"""Measures the memory of thousands of nearly idle streams in one gateway process, and that none is dropped.

Every stream gets a token every two seconds until all streams have begun and have been open together for a while.
Memory is the increase of the proportional set size of the gateway's processes at its highest. `--routers` measures
other routers, one by one.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

from peers.install import InstallFailed
from peers.process import MemoryWatch, PeerFailed
from processes import tree_memory
from report import ROOT, machine, markdown_table
from routers.catalogue import OURS, Router, routers
from routers.stage import Scene, cores, stage, started

from pagemill_protocol.shares import TIMES_FREE

NUM_PODS = 16
PATIENCE_S = 90.0
"""On a slow machine streams may begin late without being dropped."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    known = routers()
    args = _arguments(list(known))
    seconds = args.streams / args.rate + args.together_s
    scene = Scene(
        NUM_PODS,
        # All streams are of one tenant, and a tenant alone gets nine tenths of the places.
        math.ceil(args.streams * (TIMES_FREE + 1) / TIMES_FREE) + 16,
        num_tokens=math.ceil(seconds / args.event_s),
        step_ms=1000 * args.event_s,
        patience_s=PATIENCE_S,
    )
    found: dict[str, dict[str, Any]] = {}
    for name in args.routers:
        try:
            known[name].install(args.uv)
            found[name] = measure(known[name], scene, args.streams, args.rate)
        except (InstallFailed, PeerFailed) as failure:
            found[name] = {"failed": str(failure)}
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}: {json.dumps(found[name])}\n")
    report(found)


def measure(router: Router, scene: Scene, num_streams: int, rate: float) -> dict[str, Any]:
    with stage(scene, cores()) as around, started(router, around) as running:
        assert running.process is not None
        pid = running.process.pid
        before_mib, cpu_s = tree_memory(pid).pss_mib, running.cpu_s()
        with MemoryWatch(pid) as memory:
            reported = around.load(running.ports, rate, num_requests=num_streams)
        used_s = running.cpu_s() - cpu_s
        return {
            "num_streams": reported["num_sent"],
            "num_dropped": reported["num_sent"] - reported["num_done"],
            "causes": reported["causes"],
            "most_open": reported["most_open"],
            "kib_per_stream": (memory.peak_mib - before_mib) * 1024 / max(1, reported["most_open"]),
            "before_mib": before_mib,
            "peak_mib": memory.peak_mib,
            "cpu_us_per_event": used_s * 1e6 / (reported["num_sent"] * scene.num_tokens),
            "ttft_ms": reported["ttft_ms"],
        }


def report(found: dict[str, dict[str, Any]]) -> None:
    about = machine()
    columns = ["router", "streams at once", "dropped", "KiB a stream", "MiB before", "MiB at most", "CPU us an event"]
    keys = ("most_open", "num_dropped", "kib_per_stream", "before_mib", "peak_mib", "cpu_us_per_event")
    rows = [[name, *(_shown(values, key) for key in keys)] for name, values in found.items()]
    print(f"{about['cores']} cores of {about['cpu']}, {about['date']}, load {about['load_1min']}\n")
    print(markdown_table(columns, rows) + "\n")
    print(json.dumps({"bench": "gateway_streams", "routers": found, "machine": about}), flush=True)
    ours = found.get(OURS, {})
    if "failed" in ours or ours.get("num_dropped"):
        raise SystemExit(f"{OURS}: {ours.get('failed') or ours['causes']}")


def _shown(values: dict[str, Any], key: str) -> str:
    if "failed" in values:
        return "failed"
    value = values[key]
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", nargs="+", default=[OURS], choices=names)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=200.0, help="new streams per second")
    parser.add_argument("--event-s", type=float, default=2.0, help="seconds between two tokens of a stream")
    parser.add_argument(
        "--together-s",
        type=float,
        default=20.0,
        help="seconds for which all streams are open after the last one has begun",
    )
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    return parser.parse_args()


if __name__ == "__main__":
    main()

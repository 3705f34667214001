"""Measures the time of `pagemill up --dashboards` to the first answer, and to a dashboard with data.

A dashboard has data once every stat panel of *Fleet capacity* that this load can fill has a value in Prometheus: its
recording rules have run over at least one scrape of a ready engine. Everything is installed beforehand; `make up` on a
fresh clone is measured separately (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

from processes import stop
from report import ROOT, emit, median

sys.path.insert(0, str(ROOT / "charts"))
from observability import rules

EXAMPLE = ROOT / "examples" / "llmdeployment.yaml"
TIMEOUT_S = 180.0
POLL_S = 0.25
SHOWN = (rules.HEADROOM, rules.READY, f'{rules.NEEDED}{{horizon="0m"}}')
"""Series that the page shows for an idle deployment; a forecast requires a trend, and the cost requires a price."""


def measure(example: Path) -> tuple[float, float]:
    """Return the seconds until the first text, and until the page has data."""
    argv = [sys.executable, "-m", "pagemill", "up", "-f", str(example), "--port", "0", "--keep", "--dashboards"]
    start = time.perf_counter()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    try:
        url, first_s = _read_until_ready(process)
        deadline = start + TIMEOUT_S
        while not all(_has_data(url, expression) for expression in SHOWN):
            if time.perf_counter() > deadline:
                raise SystemExit(f"Fleet capacity has no data after {TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return first_s, time.perf_counter() - start
    finally:
        stop(process)


def _read_until_ready(process: subprocess.Popen[str]) -> tuple[str, float]:
    """Return Prometheus's URL and the command's own report of the seconds to its first text."""
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if "Ctrl-C stops everything" in line:
            break
    url = re.search(r"Prometheus\s+(http://\S+)", shown)
    first = re.search(r"([\d.]+) s from start to first token", shown)
    if url is None or first is None:
        raise SystemExit(f"pagemill up named no Prometheus or gave no answer:\n{shown}")
    return url.group(1), float(first.group(1))


def _has_data(url: str, expression: str) -> bool:
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=5) as response:
            return bool(json.load(response)["data"]["result"])
    except OSError:
        return False  # Prometheus is still starting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the median counts")
    parser.add_argument("--example", type=Path, default=EXAMPLE)
    args = parser.parse_args()
    runs = [measure(args.example) for _ in range(args.runs)]
    firsts, dashboards = ([run[i] for run in runs] for i in range(2))
    rows = [["first text", median(firsts)], ["Fleet capacity has data", median(dashboards)]]
    emit("first_dashboard", ["pagemill up --dashboards, median", "s"], rows, {"first": firsts, "data": dashboards})


if __name__ == "__main__":
    main()

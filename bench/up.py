"""Measures the time of `pagemill up` from the command to the first text and to the clean end, without a terminal.

Runs the first example with everything installed. Each printed line is stamped with its time, which shows the phases;
the time to the first token is the one that the command reports.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from processes import stop
from report import ROOT, emit, median

EXAMPLE = ROOT / "examples" / "llmdeployment.yaml"
TIMEOUT_S = 300.0


def run_up(example: Path) -> tuple[list[tuple[float, str]], float, int]:
    """Return the command's output lines with their times, its total time, and its exit code."""
    start = time.perf_counter()
    argv = [sys.executable, "-m", "pagemill", "up", "-f", str(example)]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        lines = [(time.perf_counter() - start, line.rstrip()) for line in process.stdout]
        code = process.wait(timeout=TIMEOUT_S)
    finally:
        stop(process)
    return lines, time.perf_counter() - start, code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the median counts")
    parser.add_argument("--example", type=Path, default=EXAMPLE)
    args = parser.parse_args()
    totals, firsts = [], []
    for _ in range(args.runs):
        lines, total_s, code = run_up(args.example)
        for at_s, line in lines:
            print(f"{at_s:7.2f} s  {line}")
        if code != 0:
            raise SystemExit(f"pagemill up ended with exit code {code}")
        totals.append(total_s)
        firsts.append(first_token_s(lines))
    rows = [["first token", median(firsts)], ["whole command, to its clean end", median(totals)]]
    emit("up", ["pagemill up, median", "s"], rows, {"first_token_s": firsts, "total_s": totals})


def first_token_s(lines: list[tuple[float, str]]) -> float:
    """Return the reported seconds from the start of the process to the first text of the answer."""
    for _, line in lines:
        if match := re.search(r"([\d.]+) s from start to first token", line):
            return float(match[1])
    raise SystemExit("pagemill up did not report its time to first token")


if __name__ == "__main__":
    main()

"""Compares Pagemill with vLLM, OpenVINO GenAI, llama.cpp and Hugging Face: the same model, work and two threads.

Installs each peer into an environment of its own, writes the weights in each one's format, and measures every row
alternately: one run of each peer, then the next run. `--rows`, `--peers` and `--first-run` measure a part; `--json`
stores it, and `--render` merges parts. A peer that cannot be installed or fails is shown with its cause. Exits with 1
if a row of Pagemill failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from peers.catalogue import OURS, Peer, peers
from peers.install import InstallFailed
from peers.results import Results, load, merge
from peers.rows import FULL, QUICK, ROWS
from peers.session import Session
from peers.table import markdown, ratios
from report import ROOT


def main() -> None:
    known = peers()
    args = _arguments(list(known))
    if args.render:
        return report(merge(load(path) for path in args.render), list(known.values()))
    # so that the peers are ended and the finished results are stored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runs = range(args.first_run, args.first_run + args.runs)
    session = Session(QUICK if args.quick else FULL, runs, args.timeout_s, args.quick)
    try:
        measure(session, args, [known[name] for name in args.peers])
    finally:
        if args.json is not None:
            session.results.save(args.json)
    report(session.results, list(known.values()))


def measure(session: Session, args: argparse.Namespace, chosen: list[Peer]) -> None:
    rows = [ROWS[name] for name in args.rows]
    there = []
    for peer in chosen:
        try:
            peer.install(args.uv)
        except InstallFailed as failure:
            session.not_there(peer, rows, str(failure))
            continue
        there.append(peer)
    session.measure(rows, there)


def report(results: Results, known: list[Peer]) -> None:
    about = results.machine
    print(f"{about['cores']} cores of {about['cpu']} ({about['simd']}), {about['date']}, commit {about['pagemill']}\n")
    print(markdown(results, known) + "\n")
    ours = [each for each in results.problems if each.peer.startswith(OURS) and results.cause(each.peer, each.row)]
    line: dict[str, Any] = {"bench": "side_by_side", "quick": results.quick, "ratios": ratios(results, known)}
    line |= {"problems": [each.__dict__ for each in results.problems], "about": results.about, "machine": about}
    print(json.dumps(line), flush=True)
    if ours:
        raise SystemExit(f"{ours[0].peer} failed in `{ours[0].row}`: {ours[0].cause}")


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--peers", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--runs", type=int, default=3, help="number of runs; the median counts, and percentiles are over all runs"
    )
    parser.add_argument(
        "--first-run", type=int, default=0, help="number of the first run; each run has its own prompts"
    )
    parser.add_argument("--quick", action="store_true", help="do little work, to check that everything runs")
    parser.add_argument(
        "--timeout-s", type=float, default=900.0, help="limit in seconds for one run of one row by one peer"
    )
    parser.add_argument("--json", type=Path, help="store the samples in this file")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="only show the results in these files")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    return parser.parse_args()


if __name__ == "__main__":
    main()

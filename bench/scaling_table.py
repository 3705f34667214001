"""Computes the table of `scaling_bounds` for every kind of traffic, load and cold start, in runs that can be resumed.

`run` simulates the cells that the results lack, cheap ones first, and adds one line of JSON for each; it may be stopped
at any time and continues where it stopped. `--changes 0` leaves the clairvoyant out. `--again pagemill` simulates one
policy again in existing cells, and `--missing wva` one that existing cells lack; the latest line counts. `render` makes
the tables for the documentation from all lines, and reports which goals are met.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from report import machine
from scaling_bounds import KINDS, LOADS, cold_start_of, compare
from scaling_goals import render, results_of

RESULTS = Path(__file__).resolve().parents[1] / ".pagemill" / "scaling-table.jsonl"
COLD_STARTS_S = (10.0, 60.0, 300.0)
SEEDS = (1, 2)
CHANGES = 8


class Cell(NamedTuple):
    kind: str
    load: str
    cold_start_s: float
    seed: int


def cells(seeds: tuple[int, ...] = SEEDS) -> list[Cell]:
    """Return light and middle loads with short starts first, one seed after the other."""
    loads = list(LOADS)

    def rank(cell: Cell) -> tuple[bool, int, int, float]:
        is_expensive = cell.load == "heavy" or cell.cold_start_s > 60
        return is_expensive, seeds.index(cell.seed), loads.index(cell.load), cell.cold_start_s

    return sorted((Cell(*each) for each in itertools.product(KINDS, loads, COLD_STARTS_S, seeds)), key=rank)


def simulate(cell: Cell, names: list[str], changes: int, held: dict[int, float]) -> dict[str, Any]:
    """Simulate a cell and return its line of the results. `changes` is that of `compare`."""
    began_s = time.process_time()
    cold_start = cold_start_of(cell.cold_start_s)
    figures, trials = compare(KINDS[cell.kind], cell.load, cold_start, cell.seed, names, changes, held)
    return {
        **cell._asdict(),
        "figures": {each.policy: msgspec.to_builtins(each) for each in figures},
        "frontier": [(each.missed, each.pod_seconds) for each in trials.frontier],
        "held": held,
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines: the last one may have been cut off."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def known_capacity(lines: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the known capacity of replicas by kind."""
    found: dict[str, dict[int, float]] = {name: {} for name in KINDS}
    for line in lines:
        found[line["kind"]].update({int(replicas): held for replicas, held in line["held"].items()})
    return found


def runs(lines: list[dict[str, Any]], args: argparse.Namespace) -> Iterator[tuple[Cell, list[str]]]:
    """Yield the cells to simulate, each with its policies; no policies: all of them."""
    done: dict[Cell, set[str]] = {}
    for line in lines:
        cell = Cell(line["kind"], line["load"], line["cold_start_s"], line["seed"])
        done.setdefault(cell, set()).update(line["figures"])
    for cell in cells(tuple(args.seeds)):
        if cell.kind not in args.kinds or cell.load not in args.loads or cell.cold_start_s not in args.cold_starts:
            continue
        if not args.again and not args.missing and cell not in done:
            yield cell, args.policies
        elif cell in done and (names := args.again or [each for each in args.missing if each not in done[cell]]):
            yield cell, names


def run(args: argparse.Namespace) -> None:
    """Add a line for each cell as soon as it is simulated; start none after the time is up."""
    until_s = time.monotonic() + 60 * args.minutes
    lines, about = read(args.results), machine()
    held, open_runs = known_capacity(lines), runs(lines, args)
    changes = -1 if args.again or args.missing else args.changes
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.processes) as pool, args.results.open("a") as out:
        running: set[Future[dict[str, Any]]] = set()
        while True:
            while len(running) < args.processes and time.monotonic() < until_s and (each := next(open_runs, None)):
                cell, names = each
                running.add(pool.submit(simulate, cell, names, changes, held[cell.kind]))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                line = future.result()
                held[line["kind"]].update(line["held"])
                out.write(json.dumps({**line, "commit": about["pagemill"], "date": about["date"]}) + "\n")
                out.flush()
                print(*(line[name] for name in ("kind", "load", "cold_start_s", "seed", "cpu_s")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "render"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="file with one line of JSON per cell")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--cold-starts", type=float, nargs="+", default=list(COLD_STARTS_S), metavar="SECONDS")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--policies", nargs="+", default=[], help="policies to simulate in addition to the bounds; default: all"
    )
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="POLICY", help="simulate only these policies, in existing cells"
    )
    parser.add_argument(
        "--missing", nargs="+", default=[], metavar="POLICY", help="simulate these policies in the cells that lack them"
    )
    parser.add_argument(
        "--changes", type=int, default=CHANGES, help="number of changes that the clairvoyant tries; 0: no clairvoyant"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes in which new cells are started")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        print(render([each for each in results_of(read(args.results)) if each.seed in args.seeds]))


if __name__ == "__main__":
    main()

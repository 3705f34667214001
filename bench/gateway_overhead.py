"""Compares our gateway with nginx, vllm-router, smg and LiteLLM: CPU per request, added TTFT, sustained rate.

All routers get the same simulated pods, requests and cores: streams of 32 chunks for prompts of 200 tokens. The router
has one core; pods and load generator have the others. Each round takes every contender in turn, starting without a
router. CPU is the kernel's count for the router's processes, which other work hardly changes; latencies do depend on
it. `--workers 1 2` compares our gateway with that many workers and smg with as many threads, on as many cores. `--json`
keeps the samples, `--render` combines several files. The exit code is 1 if our own gateway failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from peers.install import InstallFailed
from peers.process import PeerFailed
from peers.results import Problem, Results, Sample, load, merge
from report import ROOT, machine, progress
from routers.catalogue import DIRECT, OURS, SMG, Router, routers, with_cores
from routers.ladder import FULL, SMOKE, Size, climb
from routers.stage import cores, name_of
from routers.table import by_rate, figures, markdown

SHOWN_RATES = (20.0, 100.0, 200.0, 250.0, 400.0, 500.0, 1000.0)


def main() -> None:
    known = routers()
    args = _arguments(list(known))
    if args.render:
        return report(merge(load(path) for path in args.render))
    size = SMOKE if args.smoke else FULL
    size = size._replace(**{name: value for name, value in _asked_size(args).items() if value is not None})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes are ended and what is done is kept
    results = Results(machine(), args.smoke)
    try:
        contenders = [None, *_installed(results, _chosen(args, known), args.uv)]
        for number in range(args.first_round, args.first_round + args.rounds):
            for contender in contenders:
                measure(results, contender, number, size)
    finally:
        if args.json is not None:
            results.save(args.json)
    report(results)


def measure(results: Results, contender: Router | None, number: int, size: Size) -> None:
    """Measure one contender at rising rates. If it fails, show the cause and stop measuring it."""
    name, where = name_of(contender), cores(contender.num_cores if contender is not None else 1)
    if where.num_lacking:
        progress(f"{name}: {where.num_lacking} cores are missing, so it shares one with pods and load: not quiet")
    try:
        for row, values in climb(contender, size, where):
            results.samples.append(Sample(name, row, number, values))
            progress(f"{name}, round {number}, {row}: {_summary(values)}")
    except PeerFailed as failure:
        results.problems.append(Problem(name, "ladder", str(failure)))
        progress(f"{name}: {failure}")


def report(results: Results) -> None:
    names = list(dict.fromkeys([each.peer for each in results.samples] + [each.peer for each in results.problems]))
    about = results.machine
    print(f"{about['cores']} cores of {about['cpu']}, {about['date']}, load {about['load_1min']}\n")
    print(markdown(results, names, SHOWN_RATES) + "\n")
    print(by_rate(results, names) + "\n")
    line: dict[str, Any] = {
        "bench": "gateway_overhead",
        "quick": results.quick,
        "routers": {name: figures(results, name, SHOWN_RATES) for name in names if name != DIRECT},
        "problems": [each.__dict__ for each in results.problems],
        "machine": about,
    }
    print(json.dumps(line), flush=True)
    ours = [each for each in results.problems if each.peer == DIRECT or each.peer.partition(",")[0] == OURS]
    if ours:
        raise SystemExit(f"{ours[0].peer} failed: {ours[0].cause}")


def _chosen(args: argparse.Namespace, known: dict[str, Router]) -> list[Router]:
    if not args.workers:
        return [known[name] for name in args.routers or known]
    try:
        return [with_cores(known[name], number) for number in args.workers for name in args.routers or (OURS, SMG)]
    except ValueError as error:
        raise SystemExit(str(error)) from error


def _installed(results: Results, chosen: list[Router], uv: Path) -> list[Router]:
    there = []
    for router in chosen:
        try:
            router.install(uv)
        except InstallFailed as failure:
            results.problems.append(Problem(router.name, "install", str(failure)))
            progress(f"{router.name}: {failure}")
            continue
        there.append(router)
    return there


def _asked_size(args: argparse.Namespace) -> dict[str, Any]:
    rates = tuple(sorted(args.rates)) if args.rates else None
    return {
        "num_pods": args.pods,
        "rates": rates,
        "seconds": args.seconds,
        "num_prompt_tokens": args.prompt_tokens,
        "climb_on": args.climb_on,
        "num_tries": args.tries,
    }


def _summary(values: dict[str, Any]) -> str:
    if "ttft_ms" not in values:
        return json.dumps(values)
    ttft = values["ttft_ms"] or {"p50": float("nan"), "p99": float("nan")}
    words = [f"{values['cpu_ms']:.3f} ms CPU", f"TTFT {ttft['p50']:.2f} / {ttft['p99']:.2f} ms"]
    words += [f"{values['num_done']} of {values['num_sent']}", f"lag p99 {values['lag_ms']['p99']:.2f} ms"]
    words += [f"cores {values['router_share']:.2f} and {values['load_share']:.2f}"]
    words += [word for word in ("lagged", "held") if values[word]]
    return ", ".join(words) + (f" {json.dumps(values['causes'])}" if values["causes"] else "")


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--routers", nargs="+", choices=names, help="routers to measure; default: all, unless --workers is given"
    )
    parser.add_argument(
        "--workers", nargs="+", type=int, help="numbers of our workers and of smg's threads, each on as many cores"
    )
    parser.add_argument("--smoke", action="store_true", help="do little work, to check that everything runs")
    parser.add_argument("--rates", nargs="+", type=float, help="rates to measure, in requests per second")
    parser.add_argument("--seconds", type=float, help="duration of one run in seconds")
    parser.add_argument("--pods", type=int)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument(
        "--climb-on",
        action="store_true",
        default=None,
        help="measure every rate, also above one that was not sustained",
    )
    parser.add_argument("--tries", type=int, help="number of tries of a run in which the load lagged")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds; the median counts")
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the samples in this file")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="only show the results in these files")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Compares which pods our routing policies, vllm-router and smg choose, with the same traffic over HTTP.

Four pods run the real scheduler, KV cache and server on a simulated device, in separate processes. The traffic is that
of `bench/routing.py`, as chats in words. The routers are the real programs with their cache-aware policies. Each
contender starts with fresh pods and takes all kinds of traffic; times are those of the simulated device.
`--gateways 1 3` runs one and then three in front of the pods, and `--kill` kills one of them under load. A busy machine
hides small differences (`bench/routing.py` compares our own policies on a virtual clock). The exit code is 1 if a
request through our gateway failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from peers.install import InstallFailed
from peers.process import PeerFailed, PeerProcess
from report import ROOT, machine, markdown_table, progress
from routers.catalogue import OURS, Site, Start, routers, start_pagemill
from routers.chats import Chats, Reported, words
from routers.engines import TOKEN, Engines, engines
from routers.stage import FOLDER

from pagemill_routing.policies.registry import BUILT_IN
from pagemill_simulator.conversations import TRAFFIC
from pagemill_simulator.engine import Percentiles

RIVALS = ("vllm-router", "smg")
POLICIES = tuple(each.name for each in BUILT_IN)
DEFAULT = (f"{OURS} Cost", f"{OURS} LeastRequest", *RIVALS, "nginx")
START_TIMEOUT_S = 120.0
SETTLE_S = 2.0
RANKS = ("mean", "p50", "p99")
KILL_SEED = 99
WARM_UP_SEED, WARM_UP_CONVERSATIONS = 98, 24
"""A warm-up, because the first requests meet processes that import modules and engines without step times."""
KILLED = "one gateway killed"
"""Name of an additional kind of traffic: the first one again, while a gateway is killed."""

Figures = dict[str, dict[str, dict[str, Any]]]
"""Figures by traffic and contender."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    args = _arguments()
    if args.render:
        return report(*_merged(args.render), args)
    vocabulary = words()
    found: Figures = {kind: {} for kind in args.traffic}
    problems: dict[str, str] = {}
    try:
        for name in args.contenders:
            compare(name, found, problems, args, vocabulary)
    finally:
        if args.json is not None:
            args.json.write_text(json.dumps([found, problems]))
    report(found, problems, args)


def compare(
    name: str, found: Figures, problems: dict[str, str], args: argparse.Namespace, vocabulary: list[str]
) -> None:
    """Measure one contender with all traffic and each number of gateways; show the causes of failures."""
    for num_gateways in args.gateways:
        label = labelled(name, num_gateways)
        try:
            for kind, values in measure(_starter(name, args.uv), num_gateways, args, vocabulary):
                found.setdefault(kind, {})[label] = values
                progress(f"{label}, {kind}: {json.dumps(values)}")
        except (InstallFailed, PeerFailed) as failure:
            problems[label] = str(failure)
            progress(f"{label}: {failure}")


def measure(
    start: Callable[[Site], Start], num_gateways: int, args: argparse.Namespace, vocabulary: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the results of each kind of traffic over all seeds, and of killing a gateway if requested."""
    folder = FOLDER / "routing"
    with engines(args.pods, args.slowdown, folder) as ports, _gateways(start, ports, num_gateways, folder) as gateways:
        for gateway in gateways:
            _wait(gateway, vocabulary)
        time.sleep(SETTLE_S)
        chats = Chats([each.url for each in gateways], vocabulary, args.slowdown)
        chats.run(TRAFFIC[args.traffic[0]](WARM_UP_SEED)[:WARM_UP_CONVERSATIONS], seed=WARM_UP_SEED)
        for kind in args.traffic:
            reported = Reported()
            for seed in range(1, args.seeds + 1):
                traffic = TRAFFIC[kind](seed)[: args.conversations]
                _add(reported, chats.run(traffic, seed=list(TRAFFIC).index(kind) * 1000 + seed))
            yield kind, figures(reported)
        if args.kill:
            killed = gateways[0]
            traffic = TRAFFIC[args.traffic[0]](KILL_SEED)[: args.conversations]
            reported = chats.run(traffic, seed=KILL_SEED, midway=killed.process.kill)
            yield KILLED, survivors(reported, killed.url)


class Gateway(NamedTuple):
    process: PeerProcess
    url: str


@contextmanager
def _gateways(
    start: Callable[[Site], Start], ports: Engines, num_gateways: int, folder: Path
) -> Iterator[list[Gateway]]:
    """Start several routers of one kind, each in front of all engines and independent of the others."""
    gateways: list[Gateway] = []
    try:
        for number in range(num_gateways):
            own = folder / f"gateway-{number}"
            how = start(Site(ports.data_ports, own, 4096, ports.control_ports, TOKEN))
            process = PeerProcess(how.argv, how.environment, own / "router.log")
            gateways.append(Gateway(process, f"http://127.0.0.1:{how.port}"))
        yield gateways
    finally:
        for gateway in gateways:
            gateway.process.stop()


def labelled(name: str, num_gateways: int) -> str:
    return name if num_gateways == 1 else f"{name} x{num_gateways}"


def survivors(reported: Reported, killed_url: str) -> dict[str, Any]:
    """Return the results of a run with a killed gateway; only failures of the other gateways' clients count."""
    rest = Reported(**{**reported.__dict__, "faults": []})
    for fault, url in zip(reported.faults, reported.faulty_urls, strict=True):
        if url != killed_url:
            rest.faults.append(fault)
    return {**figures(rest), "num_cut_with_the_gateway": len(reported.faults) - len(rest.faults)}


def figures(reported: Reported) -> dict[str, Any]:
    ranks = Percentiles.of(reported.ttft_ms)
    return {
        "num_requests": len(reported.ttft_ms),
        "num_failed": len(reported.faults),
        "faults": sorted(set(reported.faults))[:3],
        "ttft_mean_ms": sum(reported.ttft_ms) / max(1, len(reported.ttft_ms)),
        "ttft_p50_ms": ranks.p50,
        "ttft_p99_ms": ranks.p99,
        "tpot_mean_ms": sum(reported.tpot_ms) / max(1, len(reported.tpot_ms)),
        "cached_share": reported.num_cached_tokens / max(1, reported.num_prompt_tokens),
    }


def against_one(found: Figures) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by traffic and contender, the ratio of times with several gateways to those with one."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for kind, by_name in found.items():
        for label, values in by_name.items():
            name, x, _ = label.rpartition(" x")
            if x and name in by_name:
                times = {
                    rank: values[f"ttft_{rank}_ms"] / max(1e-9, by_name[name][f"ttft_{rank}_ms"]) for rank in RANKS
                }
                ratios.setdefault(kind, {})[label] = {rank: round(ratio, 3) for rank, ratio in times.items()}
    return ratios


def report(found: Figures, problems: dict[str, str], args: argparse.Namespace) -> None:
    about = machine()
    print(f"{about['cores']} cores of {about['cpu']}, {about['date']}, load {about['load_1min']}\n")
    columns = ["traffic", "router", "mean TTFT ms", "p50", "p99", "from caches", "failed"]
    print(markdown_table(columns, [_row(kind, *each) for kind in found for each in found[kind].items()]) + "\n")
    for name, cause in problems.items():
        print(f"- {name}: {cause}")
    line: dict[str, Any] = {"bench": "gateway_routing", "pods": args.pods, "slowdown": args.slowdown}
    line |= {"seeds": args.seeds, "p99_against_best_rival": against_rivals(found), "figures": found}
    line |= {"against_one_gateway": against_one(found)}
    print(json.dumps({**line, "problems": problems, "machine": about}), flush=True)
    failed = [name for kind in found.values() for name, each in kind.items() if each["num_failed"]]
    ours = [name for name in [*failed, *problems] if name.startswith(OURS)]
    if ours:
        raise SystemExit(f"{ours[0]} failed")


def against_rivals(found: Figures) -> dict[str, float]:
    """Return, by traffic, the ratio of our p99 with the policy `Cost` to the best rival's; below 1 is better."""
    ratios = {}
    for kind, by_name in found.items():
        rivals = [by_name[name]["ttft_p99_ms"] for name in RIVALS if name in by_name]
        ours = by_name.get(f"{OURS} Cost")
        if rivals and ours:
            ratios[kind] = round(ours["ttft_p99_ms"] / max(1e-9, min(rivals)), 3)
    return ratios


def _merged(paths: list[Path]) -> tuple[Figures, dict[str, str]]:
    """Merge the results of several commands with different contenders."""
    found: Figures = {}
    problems: dict[str, str] = {}
    for path in paths:
        more_found, more_problems = json.loads(path.read_text())
        for kind, by_name in more_found.items():
            found.setdefault(kind, {}).update(by_name)
        problems |= more_problems
    return found, problems


def _row(kind: str, name: str, values: dict[str, Any]) -> list[str]:
    times = [f"{values[f'ttft_{rank}_ms']:.1f}" for rank in RANKS]
    return [kind, name, *times, f"{values['cached_share']:.0%}", str(values["num_failed"])]


def _starter(name: str, uv: Path) -> Callable[[Site], Start]:
    """Install a contender and return the function that starts it."""
    router, _, policy = name.partition(" ")
    if router == OURS:
        return partial(start_pagemill, policy=policy)
    known = routers()[router]
    known.install(uv)
    return known.start


def _wait(gateway: Gateway, vocabulary: list[str]) -> None:
    """Wait until a short chat is answered completely."""
    [first, *_] = TRAFFIC["long and short"](0)
    short = first._replace(start_s=0.0, turns=[first.turns[0]._replace(token_ids=[1, 2, 3], num_output_tokens=2)])
    deadline = time.monotonic() + START_TIMEOUT_S
    while faults := Chats([gateway.url], vocabulary, 1.0).run([short], seed=0).faults:
        if gateway.process.ended:
            raise PeerFailed(gateway.process.why_ended())
        if time.monotonic() > deadline:
            raise PeerFailed(f"no answer after {START_TIMEOUT_S:.0f} s: {faults[0]}")
        time.sleep(0.2)


def _add(total: Reported, more: Reported) -> None:
    total.ttft_ms += more.ttft_ms
    total.tpot_ms += more.tpot_ms
    total.num_prompt_tokens += more.num_prompt_tokens
    total.num_cached_tokens += more.num_cached_tokens
    total.faults += more.faults


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(f"{OURS} {policy}" for policy in POLICIES), *RIVALS, "nginx"]
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=names, metavar="NAME")
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument(
        "--gateways",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="numbers of gateways in front of the pods; clients are spread over them",
    )
    parser.add_argument(
        "--kill", action="store_true", help="also kill one of several gateways, in a separate run at the end"
    )
    parser.add_argument(
        "--conversations", type=int, help="largest number of conversations of each traffic; default: all"
    )
    parser.add_argument(
        "--slowdown", type=float, default=4.0, help="factor by which the simulated device and the arrivals are slowed"
    )
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="only show the results in these files")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    args = parser.parse_args()
    if args.kill and min(args.gateways) < 2:
        parser.error("--kill needs two or more --gateways")
    return args


if __name__ == "__main__":
    main()

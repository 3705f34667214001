"""Who finds the better pod: our policies and the real vllm-router and smg, on the same traffic over HTTP.

Four pods with the real scheduler, KV cache and server on a simulated device, in processes of their own; the traffic is
`bench/routing.py`'s, as chats in words. The routers are the real ones with their cache-aware policies. Each contender
starts with fresh pods and takes all kinds of traffic; times are those of the simulated device. The machine takes part:
a busy one blurs small differences (`bench/routing.py` compares our own policies on a virtual clock). Exits with 1 when
a request through our gateway failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

from peers.install import InstallFailed
from peers.process import PeerFailed, PeerProcess
from report import ROOT, machine, markdown_table
from routers.catalogue import OURS, Site, Start, routers, start_pagemill
from routers.chats import Chats, Told, words
from routers.engines import TOKEN, engines
from routers.stage import FOLDER

from pagemill_gateway.routing.policies import PolicyName
from pagemill_simulator.conversations import TRAFFIC
from pagemill_simulator.engine_report import Percentiles

RIVALS = ("vllm-router", "smg")
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT = (f"{OURS} Cost", f"{OURS} LeastRequest", *RIVALS, "nginx")
START_TIMEOUT_S = 120.0
SETTLE_S = 2.0

Figures = dict[str, dict[str, dict[str, Any]]]
"""By traffic and contender."""


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
    """One contender under all traffic; what fails is told with its cause."""
    try:
        for kind, told in measure(_starter(name, args.uv), args, vocabulary):
            found[kind][name] = figures(told)
            _tell(f"{name}, {kind}: {json.dumps(found[kind][name])}")
    except (InstallFailed, PeerFailed) as failure:
        problems[name] = str(failure)
        _tell(f"{name}: {failure}")


def measure(
    start: Callable[[Site], Start], args: argparse.Namespace, vocabulary: list[str]
) -> Iterator[tuple[str, Told]]:
    """Each kind of traffic with what came of it, all seeds together."""
    folder = FOLDER / "routing"
    with engines(args.pods, args.slowdown, folder) as ports:
        how = start(Site(ports.data_ports, folder, 4096, ports.control_ports, TOKEN))
        router = PeerProcess(how.argv, how.environment, folder / "router.log")
        url = f"http://127.0.0.1:{how.port}"
        try:
            _wait(router, url, vocabulary)
            for kind in args.traffic:
                told = Told()
                for seed in range(1, args.seeds + 1):
                    traffic = TRAFFIC[kind](seed)[: args.conversations]
                    _add(
                        told,
                        Chats(url, vocabulary, args.slowdown).run(
                            traffic, seed=list(TRAFFIC).index(kind) * 1000 + seed
                        ),
                    )
                yield kind, told
        finally:
            router.stop()


def figures(told: Told) -> dict[str, Any]:
    ranks = Percentiles.of(told.ttft_ms)
    return {
        "num_requests": len(told.ttft_ms),
        "num_failed": len(told.faults),
        "faults": sorted(set(told.faults))[:3],
        "ttft_mean_ms": sum(told.ttft_ms) / max(1, len(told.ttft_ms)),
        "ttft_p50_ms": ranks.p50,
        "ttft_p99_ms": ranks.p99,
        "tpot_mean_ms": sum(told.tpot_ms) / max(1, len(told.tpot_ms)),
        "cached_share": told.num_cached_tokens / max(1, told.num_prompt_tokens),
    }


def report(found: Figures, problems: dict[str, str], args: argparse.Namespace) -> None:
    about = machine()
    print(f"{about['cores']} cores of {about['cpu']}, {about['date']}, load {about['load_1min']}\n")
    columns = ["traffic", "router", "mean TTFT ms", "p50", "p99", "from caches", "failed"]
    print(markdown_table(columns, [_row(kind, *each) for kind in found for each in found[kind].items()]) + "\n")
    for name, cause in problems.items():
        print(f"- {name}: {cause}")
    line: dict[str, Any] = {"bench": "gateway_routing", "pods": args.pods, "slowdown": args.slowdown}
    line |= {"seeds": args.seeds, "p99_against_best_rival": against_rivals(found), "figures": found}
    print(json.dumps({**line, "problems": problems, "machine": about}), flush=True)
    failed = [name for kind in found.values() for name, each in kind.items() if each["num_failed"]]
    ours = [name for name in [*failed, *problems] if name.startswith(OURS)]
    if ours:
        raise SystemExit(f"{ours[0]} failed")


def against_rivals(found: Figures) -> dict[str, float]:
    """By traffic: our p99 with the policy by cost over the best rival's; below 1 is better."""
    ratios = {}
    for kind, by_name in found.items():
        rivals = [by_name[name]["ttft_p99_ms"] for name in RIVALS if name in by_name]
        ours = by_name.get(f"{OURS} Cost")
        if rivals and ours:
            ratios[kind] = round(ours["ttft_p99_ms"] / max(1e-9, min(rivals)), 3)
    return ratios


def _merged(paths: list[Path]) -> tuple[Figures, dict[str, str]]:
    """Of several commands with different contenders, by kinds of traffic."""
    found: Figures = {}
    problems: dict[str, str] = {}
    for path in paths:
        more_found, more_problems = json.loads(path.read_text())
        for kind, by_name in more_found.items():
            found.setdefault(kind, {}).update(by_name)
        problems |= more_problems
    return found, problems


def _row(kind: str, name: str, values: dict[str, Any]) -> list[str]:
    times = [f"{values[f'ttft_{rank}_ms']:.1f}" for rank in ("mean", "p50", "p99")]
    return [kind, name, *times, f"{values['cached_share']:.0%}", str(values["num_failed"])]


def _starter(name: str, uv: Path) -> Callable[[Site], Start]:
    """Installs what is to be started."""
    router, _, policy = name.partition(" ")
    if router == OURS:
        return partial(start_pagemill, policy=policy)
    known = routers()[router]
    known.install(uv)
    return known.start


def _wait(router: PeerProcess, url: str, vocabulary: list[str]) -> None:
    """Until a short chat is answered in full."""
    [first, *_] = TRAFFIC["long and short"](0)
    short = first._replace(start_s=0.0, turns=[first.turns[0]._replace(token_ids=[1, 2, 3], num_output_tokens=2)])
    deadline = time.monotonic() + START_TIMEOUT_S
    while faults := Chats(url, vocabulary, 1.0).run([short], seed=0).faults:
        if router.ended:
            raise PeerFailed(router.why_ended())
        if time.monotonic() > deadline:
            raise PeerFailed(f"no answer after {START_TIMEOUT_S:.0f} s: {faults[0]}")
        time.sleep(0.2)
    time.sleep(SETTLE_S)


def _add(total: Told, more: Told) -> None:
    total.ttft_ms += more.ttft_ms
    total.tpot_ms += more.tpot_ms
    total.num_prompt_tokens += more.num_prompt_tokens
    total.num_cached_tokens += more.num_cached_tokens
    total.faults += more.faults


def _tell(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(f"{OURS} {policy}" for policy in POLICIES), *RIVALS, "nginx"]
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=names, metavar="NAME")
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--conversations", type=int, help="of each traffic, at most; all of them")
    parser.add_argument("--slowdown", type=float, default=4.0, help="of the simulated device, and of the arrivals")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="only show what these files hold")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    return parser.parse_args()


if __name__ == "__main__":
    main()

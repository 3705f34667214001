"""Measures one figure of `gate` again for each line on stdin, with the packages in PYTHONPATH."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

Measure = Callable[[], float]
"""Returns milliseconds of CPU time."""
NUM_SEQUENCES = 16
STEP_REQUESTS = 256
STEPS_A_TURN = 40
GATEWAY_REQUESTS = 100
GATEWAY_RATE = 100.0


@contextlib.contextmanager
def decode() -> Iterator[Measure]:
    yield _offline(num_sequences=NUM_SEQUENCES, prompt_tokens=16, output_tokens=16)


@contextlib.contextmanager
def prefill() -> Iterator[Measure]:
    yield _offline(num_sequences=2, prompt_tokens=512, output_tokens=1)


@contextlib.contextmanager
def step() -> Iterator[Measure]:
    from step_overhead import Loop

    def measure() -> float:
        loop = Loop(STEP_REQUESTS, STEPS_A_TURN, overlap=False)
        loop.steps(STEPS_A_TURN)
        return loop.result()["step_cpu_ms"]

    yield measure


@contextlib.contextmanager
def gateway() -> Iterator[Measure]:
    from routers.catalogue import OURS, routers
    from routers.stage import Scene, cores, stage, started

    scene = Scene(num_pods=4, max_streams=64)
    with stage(scene, cores()) as around, started(routers()[OURS], around) as running:

        def measure() -> float:
            before_s = running.cpu_s()
            report = around.load(running.ports, GATEWAY_RATE, num_requests=GATEWAY_REQUESTS)
            assert report["num_done"] == GATEWAY_REQUESTS, report["causes"]
            return 1000 * (running.cpu_s() - before_s) / GATEWAY_REQUESTS

        yield measure


def _offline(num_sequences: int, prompt_tokens: int, output_tokens: int) -> Measure:
    from workload import MODEL, ORDINARY_TOKENS

    from pagemill import LLM, SamplingParams

    llm = LLM(model=MODEL, max_model_len=1024, num_threads=1, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    prompts = [
        {
            "prompt_token_ids": [
                ORDINARY_TOKENS[(7919 * (number + 1) * place) % 30_000] for place in range(prompt_tokens)
            ]
        }
        for number in range(num_sequences)
    ]

    def measure() -> float:
        start_s = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return 1000 * (time.process_time() - start_s)

    return measure


class Figure(NamedTuple):
    what: str
    prepared: Callable[[], AbstractContextManager[Measure]]


FIGURES = {
    "decode": Figure(f"decode, {NUM_SEQUENCES} sequences x 16 tokens, embedded model", decode),
    "prefill": Figure("prefill, 2 prompts x 512 tokens, embedded model", prefill),
    "step": Figure(f"step beside the model, {STEP_REQUESTS} requests", step),
    "gateway": Figure("gateway, a streamed chat of 32 events", gateway),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=list(FIGURES))
    parser.add_argument("--packages", type=Path, required=True, help="folder of the packages to measure")
    args = parser.parse_args()
    import pagemill_engine

    if not Path(pagemill_engine.__file__).is_relative_to(args.packages):
        raise SystemExit(f"pagemill_engine comes from {pagemill_engine.__file__}, not from {args.packages}")
    # Exit normally, so that started processes are ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with FIGURES[args.figure].prepared() as measure:
        measure()
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"cpu_ms": measure()}), flush=True)


if __name__ == "__main__":
    main()

"""Measures KV waste: the share of allocated slots that hold no token, sampled after every step of a workload.

Runs the real scheduler and block manager; the waste does not depend on what the model computes, so the device is
simulated and the run takes seconds. The peer is the classic reservation of a whole context per request, as static KV
caches do, computed on the same schedule. Slots are counted in whole referenced blocks, lookahead included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from report import emit
from workload import VOCAB_SIZE, Job, chat_workload, mixed_workload, trace_workload

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.null import NullRunner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


def measure(jobs: list[Job], block_size: int, max_model_len: int) -> dict[str, float]:
    """Return the waste of the whole run; the mean weighs each step by its allocated slots."""
    clock = Clock()
    config = EngineConfig(
        model="null",
        null_runner=True,
        block_size=block_size,
        num_kv_blocks=262_144 // block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
    )
    core = EngineCore(config, NullRunner.from_config(config, clock=clock, sleep=clock.advance), clock=clock)
    for number, job in enumerate(jobs):
        sampling = SamplingParams(max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True)
        core.add(
            GenerateRequest(
                request_id=str(number), model="null", prompt_token_ids=job.prompt_token_ids, sampling=sampling
            )
        )
    allocated = used = reserved = steps = 0
    worst = 0.0
    while core.has_work:
        core.step()
        usage = core.scheduler.kv.slot_usage()
        if not usage.allocated_slots:
            continue
        steps += 1
        allocated += usage.allocated_slots
        used += usage.used_slots
        reserved += core.load().num_requests_running * max_model_len
        worst = max(worst, usage.waste)
    core.check_integrity()
    return {
        "steps": steps,
        "mean_percent": 100 * (1 - used / allocated),
        "worst_step_percent": 100 * worst,
        "reserved_percent": 100 * (1 - used / reserved),
    }


class Clock:
    """Simulated seconds: a step takes its predicted time without waiting for it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument(
        "--trace", type=Path, help="CSV file of real request lengths, measured in addition to the mixed workload"
    )
    args = parser.parse_args()
    workloads = {
        "mixed": (mixed_workload(args.requests), 2048),
        "chat lengths": (chat_workload(args.requests), 2048),
    }
    if args.trace is not None:
        workloads["trace"] = (trace_workload(args.trace, args.requests), 16_384)
    results = {
        f"{name}, block {size}": measure(jobs, size, max_model_len)
        for name, (jobs, max_model_len) in workloads.items()
        for size in args.block_sizes
    }
    rows = [
        [name, int(each["steps"]), each["mean_percent"], each["worst_step_percent"], each["reserved_percent"]]
        for name, each in results.items()
    ]
    columns = ["workload", "steps", "waste %", "worst step %", "whole-context reservation %"]
    emit("kv_waste", columns, rows, {"requests": args.requests, "results": results})


if __name__ == "__main__":
    main()

"""Where the time of a step goes: linear layers, attention, the small operations, sampling, and Python around them.

One model as the engine loads it, driven as `LLM` drives it. Decodes of several widths and a prefill; every operation of
the model is timed where the model calls it, so the rest of the forward pass is torch's views and Python.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

from report import emit, median
from workload import MODEL, Job, mixed_workload

from pagemill_engine.llm import LLM
from pagemill_engine.sampling.sampler import sample
from pagemill_kernels.registry import Ops, ops_for
from pagemill_protocol.sampling import SamplingParams

PARTS = ("linear", "attention", "rope, store", "norm", "activation", "sampling", "rest of the forward pass", "loop")
_OF = {
    "paged_attention": "attention",
    "plan_attention": "attention",
    "rope_and_store": "rope, store",
    "plan_slots": "rope, store",
    "rms_norm": "norm",
    "silu_and_mul": "activation",
}


class Clock:
    """Seconds by part, of the step that runs."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spent[part] += time.perf_counter() - start
            return result

        return timed


class TimedLinear:
    """A packed linear layer behind a clock."""

    def __init__(self, packed: Any, clock: Clock) -> None:
        self._packed = packed
        self._call = clock.around("linear", packed)
        self.add_to = clock.around("linear", packed.add_to)

    def __call__(self, x: Any) -> Any:
        return self._call(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packed, name)


def timed_ops(ops: Ops, clock: Clock) -> Ops:
    def packing(pack: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: TimedLinear(pack(*args), clock)

    timed = {name: clock.around(part, getattr(ops, name)) for name, part in _OF.items()}
    codes = None if ops.pack_codes is None else packing(ops.pack_codes)
    return ops._replace(**timed, pack_linear=packing(ops.pack_linear), pack_codes=codes)


def load(model: str, clock: Clock) -> LLM:
    mock.patch("pagemill_engine.runner.load_cpu.ops_for", lambda backend: timed_ops(ops_for(backend), clock)).start()
    mock.patch("pagemill_engine.runner.cpu.sample", clock.around("sampling", sample)).start()
    return LLM(model, max_model_len=2048, max_num_batched_tokens=1024, enable_prefix_caching=False)


def measure(llm: LLM, clock: Clock, jobs: list[Job], skip: int) -> dict[str, float]:
    """Median milliseconds of a step by part; the first `skip` steps are the prompts' or warm up."""
    runner = llm._core.runner
    steps: list[dict[str, float]] = []
    launch, wait = runner.launch, runner.wait
    stages = {"launch": clock.around("launch", launch), "wait": clock.around("wait", wait)}
    last = time.perf_counter()

    def whole(plan: Any) -> Any:
        nonlocal last
        clock.spent.clear()
        return stages["launch"](plan)

    def finished(handle: Any) -> Any:
        nonlocal last
        result = stages["wait"](handle)
        now = time.perf_counter()
        spent = dict(clock.spent)
        device = spent.pop("launch") + spent.pop("wait")
        spent["loop"] = now - last - device
        spent["rest of the forward pass"] = device - sum(value for key, value in spent.items() if key != "loop")
        steps.append(spent)
        last = now
        return result

    runner.launch, runner.wait = whole, finished  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True) for job in jobs]
    llm.generate([{"prompt_token_ids": job.prompt_token_ids} for job in jobs], params, use_tqdm=False)
    runner.launch, runner.wait = launch, wait  # type: ignore[method-assign]
    return {part: 1000 * median([step.get(part, 0.0) for step in steps[skip:]]) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    clock = Clock()
    llm = load(args.model, clock)
    columns: dict[str, dict[str, float]] = {}
    for width in (1, 8, 32, 64):
        jobs = [Job(job.prompt_token_ids, 40) for job in mixed_workload(width, prompt_tokens=(128, 128), seed=width)]
        columns[f"decode {width}"] = measure(llm, clock, jobs, skip=16)
    measure(llm, clock, mixed_workload(1, prompt_tokens=(1024, 1024), output_tokens=(1, 1), seed=8), skip=0)
    jobs = mixed_workload(1, prompt_tokens=(1024, 1024), output_tokens=(1, 1), seed=9)
    columns["prefill 1,024"] = measure(llm, clock, jobs, skip=0)
    rows = [[part, *(each[part] for each in columns.values())] for part in PARTS]
    rows.append(["sum", *(sum(each.values()) for each in columns.values())])
    emit("step_profile", ["ms of a step", *columns], rows, {"model": args.model, "steps": columns})


if __name__ == "__main__":
    main()

"""Measures the cost of a step besides the model: scheduling, input building, updates.

It is measured with 16, 256 and 1,024 decoding requests on a simulated device that takes no time, so that all of it is
Pagemill's own Python, for the plain and the overlapped loop. In the plain loop it adds to every forward pass and must
stay far below it; in the overlapped loop it is hidden by the forward pass if it is shorter.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import NamedTuple

import numpy as np
import torch
from report import emit, median
from workload import VOCAB_SIZE

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device.device_rows import DeviceRows, DeviceStep
from pagemill_execution.runners.inputs import RequestRows
from pagemill_execution.runners.null import NullHandle, NullRunner
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.step import StepPlan, StepResult
from pagemill_kernels.request_rows.layout import RowLayout
from pagemill_kernels.request_rows.staging import Staging
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

PROMPT_TOKENS = 128
WARM_STEPS = 8
TURN_STEPS = 10
PLAIN, OVERLAPPED = "plain", "overlapped"


class Spent(NamedTuple):
    """Wall time, and CPU time of this thread: on a busy machine only the latter distinguishes versions."""

    wall_ms: float
    cpu_ms: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter() * 1000, time.thread_time() * 1000)

    def minus(self, other: Spent) -> Spent:
        return Spent(self.wall_ms - other.wall_ms, self.cpu_ms - other.cpu_ms)


class InputRunner:
    """The null runner with the real input building in front, timed separately."""

    def __init__(self, config: EngineConfig) -> None:
        self._null = NullRunner.from_config(config, sleep=lambda _seconds: None)
        self.info = self._null.info
        self.rows = RequestRows(config.step.max_num_seqs, self.info.max_model_len, self.info.block_size)
        self.inputs: list[Spent] = []
        self.staged: list[Spent] = []
        """Time of what a runner with its rows on a GPU does instead; not part of the step."""
        layout = RowLayout.of(config.step.max_num_seqs, self.info.max_model_len, self.info.block_size)
        self._device_rows = DeviceRows(layout)
        self._staged_step: DeviceStep | None = None
        self._sampling = SamplingRows(config.step.max_num_seqs, self.info.vocab_size)
        self.null = Spent(0.0, 0.0)
        """Time that the simulated device itself took since the start."""

    def launch(self, plan: StepPlan) -> NullHandle:
        start = Spent.now()
        self.rows.release(plan.released)
        for admitted in plan.admitted:
            self.rows.admit(admitted)
        self.rows.update_blocks(plan)
        inputs = self.rows.gather(plan)
        self.rows.advance(inputs, np.zeros(len(inputs.sampling), dtype=np.int64))
        built = Spent.now()
        self.inputs.append(built.minus(start))
        self._stage(plan)
        self.staged.append(Spent.now().minus(built))
        handle = self._null.launch(plan)
        self._note_null(built)
        return handle

    def wait(self, handle: NullHandle) -> StepResult:
        start = Spent.now()
        result = self._null.wait(handle)
        self._note_null(start)
        return result

    def _stage(self, plan: StepPlan) -> None:
        """Stage the rows up to the packed arrays, which a device would copy."""
        staging = Staging()
        self._device_rows.apply(plan, self._sampling, staging)
        step = self._device_rows.step(plan)
        if step is not self._staged_step or not staging.is_empty:
            staging.upload(step.rows, step.query_start_loc, step.sample_start_loc, torch.device("cpu"))
        self._staged_step = step
        self._device_rows.advance(step)

    def _note_null(self, start: Spent) -> None:
        self.null = self.null.minus(start.minus(Spent.now()))

    def sleep(self) -> int:
        return self._null.sleep()

    def wake(self) -> None:
        self._null.wake()

    def close(self) -> None:
        self._null.close()


class Loop:
    """An engine in pure decode steps of `num_requests` requests, and each step's time without the device."""

    def __init__(self, num_requests: int, num_steps: int, overlap: bool) -> None:
        config = EngineConfig(
            model="null",
            null_runner=True,
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(8192, num_requests),
            max_num_waiting=num_requests,
            max_model_len=PROMPT_TOKENS + num_steps + 64,
            num_kv_blocks=num_requests * (PROMPT_TOKENS + num_steps + 64) // 16 + 64,
            vocab_size=VOCAB_SIZE,
            overlap=overlap,
        )
        self._runner = InputRunner(config)
        self._core = EngineCore(config, self._runner)
        self._num_requests = num_requests
        self._spent: list[Spent] = []
        self._start(num_steps)

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            start = Spent.now().minus(self._runner.null)
            outputs = self._core.step()
            self._spent.append(Spent.now().minus(self._runner.null).minus(start))
            assert outputs.num_step_tokens == self._num_requests, "a pure decode step"

    def result(self) -> dict[str, float]:
        """Return the medians of a step."""
        wall_ms = median([spent.wall_ms for spent in self._spent])
        return {
            "step_ms": wall_ms,
            "step_cpu_ms": median([spent.cpu_ms for spent in self._spent]),
            "input_building_cpu_ms": median([spent.cpu_ms for spent in self._runner.inputs]),
            "gpu_input_building_cpu_ms": median([spent.cpu_ms for spent in self._runner.staged]),
            "us_per_request": 1000 * wall_ms / self._num_requests,
        }

    def _start(self, num_steps: int) -> None:
        sampling = SamplingParams(max_tokens=num_steps + 32, temperature=0, ignore_eos=True)
        for number in range(self._num_requests):
            prompt = [(number * 7919 + position) % VOCAB_SIZE for position in range(PROMPT_TOKENS)]
            self._core.add(
                GenerateRequest(request_id=str(number), model="null", prompt_token_ids=prompt, sampling=sampling)
            )
        while self._core.load().num_requests_waiting or self._core.load().num_tokens_waiting:
            self._core.step()
        for _ in range(WARM_STEPS):
            self._core.step()
        self._runner.inputs.clear()
        self._runner.staged.clear()


def measure(num_requests: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Measure both loops in turns of a few steps, so that other work on the machine affects both."""
    loops = {name: Loop(num_requests, num_steps, name == OVERLAPPED) for name in (PLAIN, OVERLAPPED)}
    # An engine does this before it serves: objects that stay are not visited by every garbage collection.
    gc.collect()
    gc.freeze()
    for turn in range(num_steps // TURN_STEPS):
        for loop in list(loops.values())[:: 1 if turn % 2 else -1]:
            loop.steps(TURN_STEPS)
    gc.unfreeze()
    return {name: loop.result() for name, loop in loops.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    results = {count: measure(count, args.steps) for count in args.requests}
    rows = [
        [f"{count} requests, {loop}", *figures.values()]
        for count in results
        for loop, figures in results[count].items()
    ]
    columns = ["decode step", "ms", "ms of CPU", "of it inputs", "a GPU's instead", "us / request"]
    by_loop = {loop: {count: results[count][loop] for count in results} for loop in (PLAIN, OVERLAPPED)}
    emit("step_overhead", columns, rows, {"steps": args.steps, "by_loop": by_loop})


if __name__ == "__main__":
    main()

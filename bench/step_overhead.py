"""What one step costs beside the model: scheduling, input building, booking.

Measured at 16, 256 and 1,024 decoding requests on a simulated device that takes no time, so all of it is our own
Python, for the plain and the overlapped loop. In the plain loop it adds to every forward pass and must stay far below
it; in the overlapped loop it hides behind the forward pass, as long as it is shorter.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from report import emit, median
from workload import VOCAB_SIZE

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.runner.inputs import RequestRows
from pagemill_engine.runner.null import NullHandle, NullRunner
from pagemill_engine.scheduler.step import StepPlan, StepResult
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.sampling import SamplingParams

PROMPT_TOKENS = 128
WARM_STEPS = 8


class InputRunner:
    """The null runner with the real input building in front, timed apart."""

    def __init__(self, config: EngineConfig) -> None:
        self._null = NullRunner.from_config(config, sleep=lambda _seconds: None)
        self.info = self._null.info
        self.rows = RequestRows(config.max_num_seqs, self.info.max_model_len, self.info.block_size)
        self.input_ms: list[float] = []
        self.null_ms: list[float] = []

    def launch(self, plan: StepPlan) -> NullHandle:
        start = time.perf_counter()
        self.rows.release(plan.released)
        for admitted in plan.admitted:
            self.rows.admit(admitted)
        self.rows.update_blocks(plan)
        inputs = self.rows.gather(plan)
        self.rows.advance(inputs, np.zeros(len(inputs.sampling), dtype=np.int64))
        self.input_ms.append((time.perf_counter() - start) * 1000)
        start = time.perf_counter()
        handle = self._null.launch(plan)
        self.null_ms.append((time.perf_counter() - start) * 1000)
        return handle

    def wait(self, handle: NullHandle) -> StepResult:
        start = time.perf_counter()
        result = self._null.wait(handle)
        self.null_ms[-1] += (time.perf_counter() - start) * 1000
        return result

    def close(self) -> None:
        self._null.close()


def measure(num_requests: int, num_steps: int, overlap: bool) -> dict[str, float]:
    """Median milliseconds of a pure decode step over `num_requests` requests."""
    num_blocks = num_requests * (PROMPT_TOKENS + num_steps + 64) // 16 + 64
    config = EngineConfig(
        model="null",
        null_runner=True,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(8192, num_requests),
        max_num_waiting=num_requests,
        max_model_len=PROMPT_TOKENS + num_steps + 64,
        num_kv_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        overlap=overlap,
    )
    runner = InputRunner(config)
    core = EngineCore(config, runner)
    sampling = SamplingParams(max_tokens=num_steps + 32, temperature=0, ignore_eos=True)
    for number in range(num_requests):
        prompt = [(number * 7919 + position) % VOCAB_SIZE for position in range(PROMPT_TOKENS)]
        core.add(GenerateRequest(request_id=str(number), model="null", prompt_token_ids=prompt, sampling=sampling))
    while core.load().num_requests_waiting or core.load().num_tokens_waiting:
        core.step()
    for _ in range(WARM_STEPS):
        core.step()
    runner.input_ms.clear()
    runner.null_ms.clear()
    totals = [_timed_step(core) for _ in range(num_steps)]
    own = [total - null for total, null in zip(totals, runner.null_ms, strict=True)]
    return {
        "step_ms": median(own),
        "input_building_ms": median(runner.input_ms),
        "scheduling_and_booking_ms": median(own) - median(runner.input_ms),
        "us_per_request": 1000 * median(own) / num_requests,
    }


def _timed_step(core: EngineCore) -> float:
    start = time.perf_counter()
    outputs = core.step()
    assert outputs.num_step_tokens == core.load().num_requests_running, "a pure decode step"
    return (time.perf_counter() - start) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    results = {
        loop: {count: measure(count, args.steps, loop == "overlapped") for count in args.requests}
        for loop in ("plain", "overlapped")
    }
    rows = [
        [f"{count} requests, {loop}", *results[loop][count].values()] for count in args.requests for loop in results
    ]
    columns = ["decode step", "total ms", "inputs ms", "scheduling ms", "us / request"]
    emit("step_overhead", columns, rows, {"steps": args.steps, "by_loop": results})


if __name__ == "__main__":
    main()

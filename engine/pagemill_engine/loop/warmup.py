"""Self-test and calibration before ready, and the probe of a device: tokens that are computed outside all requests.

Before ready the self-test generates a token, and the times of small steps are measured.
Larger steps are measured once the engine is idle. Everything runs through the whole core, so requests use what was
tested here. No cached prefix and no counter remains. The measurements are the step-time model's prior; requests refine
it.
"""

from __future__ import annotations

import math
import time
from collections import deque

from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan
from pagemill_protocol.report.step_time import StepSample, StepTimeModel, default_knots
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import SamplingParams

CPU_LIMIT_S = 0.05
"""Time limit before ready on a CPU; the rest is measured while there are no requests."""
DEVICE_LIMIT_S = 0.8
"""Time limit before ready on a device, whose first step of a size also prepares that size."""
LONGEST_STEP_MS = 300.0
"""Longest step that is measured after ready, in milliseconds."""
SLOW_STEP_MS = 100.0
BATCH_SIZE = 16
"""The larger of the two sizes that are measured first; its native kernels are those of hundreds of tokens."""
_SKIPPED_SIZES = {4}
"""Between 1 and 8 tokens a line is accurate enough for a prior."""
_TOKEN_STRIDE = 7919
"""Spreads prompt tokens over the vocabulary."""


class SelfTestError(RuntimeError):
    """The engine loaded the model but cannot generate."""


def self_test(core: EngineCore) -> None:
    """Generate one token, or pool one. Raises `SelfTestError` if that fails."""
    for output in _run_prompts(core, 1, 1).outputs:
        if output.error is not None:
            raise SelfTestError(output.error)
        if any(not 0 <= token_id < core.runner.info.vocab_size for token_id in output.token_ids):
            raise SelfTestError(f"the model produced token ids {output.token_ids}, which are not in its vocabulary")
        if output.token_ids or output.pooled:
            _reset_side_effects(core)
            return
    raise SelfTestError("the model produced nothing")


class Calibration:
    """Measures the prior of the step-time model: step times by prompt size, and the extra time of a decode.

    Sizes beyond the measured ones are extrapolated on a line. Context costs are learned from requests: prompts without
    a context cannot separate them from the cost of tokens.
    """

    def __init__(self, core: EngineCore) -> None:
        limits = core.scheduler.limits
        self._core = core
        self._largest = largest = min(limits.max_num_batched_tokens, limits.max_total_tokens - 1)
        sizes = sorted(default_knots(largest), key=lambda size: (size > BATCH_SIZE, size not in (1, BATCH_SIZE), size))
        self._remaining_sizes = deque(size for size in sizes if size not in _SKIPPED_SIZES or size == largest)
        self._sample_ms: dict[int, float] = {}
        self._decode_ms: float | None = None
        """Milliseconds that one decode takes beyond a prompt's token; None: not measured."""
        self._num_steps = 0
        """The core's step count when the last size was measured."""

    def begin(self, limit_s: float | None = None) -> None:
        """Measure sizes for about `limit_s` seconds, by default the limit of the device.

        Sizes that would take longer are left. At least two are measured: fewer would not show how time grows.
        """
        if limit_s is None:
            limit_s = CPU_LIMIT_S if self._core.runner.info.device == "cpu" else DEVICE_LIMIT_S
        end_s = time.monotonic() + limit_s
        while self._has_more and (len(self._sample_ms) < 2 or self._expected_ms() <= (end_s - time.monotonic()) * 1000):
            self._measure()
        self._fit()

    def measure_next(self) -> bool:
        """Measure one more size if the core has no work. Returns whether it did.

        It does not if everything is measured, if the step would keep a request waiting for long, or if there were
        requests, from which the model learns.
        """
        if not self._has_more or self._core.num_steps != self._num_steps or self._expected_ms() > LONGEST_STEP_MS:
            return False
        self._measure()
        self._fit()
        return True

    @property
    def _has_more(self) -> bool:
        return bool(self._remaining_sizes) or self._measures_decode_next

    @property
    def _measures_decode_next(self) -> bool:
        return (
            self._decode_ms is None
            and BATCH_SIZE in self._sample_ms
            and _max_prompts_per_step(self._core) >= BATCH_SIZE
        )

    def _expected_ms(self) -> float:
        return (
            self._sample_ms[BATCH_SIZE]
            if self._measures_decode_next
            else _estimated_ms(self._sample_ms, self._remaining_sizes[0])
        )

    def _measure(self) -> None:
        if self._measures_decode_next:
            self._decode_ms = max(0.0, _measure_ms(self._core, BATCH_SIZE, 1) - self._sample_ms[BATCH_SIZE]) / (
                BATCH_SIZE - 1
            )
            return
        size = self._remaining_sizes.popleft()
        # Steps of a smaller size compute as many tokens: one that takes half as long as these together is doubtful.
        smaller = {known: ms for known, ms in self._sample_ms.items() if known < size}
        credible_ms = min((size / known * ms / 2 for known, ms in smaller.items()), default=0.0)
        self._sample_ms[size] = _measure_ms(self._core, 1, size, credible_ms if size <= BATCH_SIZE else math.inf)

    def _fit(self) -> None:
        stages = self._core.step_time.stages  # each step was measured alone
        samples = [StepSample(size, 0, 0, ms / stages) for size, ms in self._sample_ms.items()]
        self._core.step_time = StepTimeModel.from_calibration(samples, self._largest, (self._decode_ms or 0.0) / stages)
        self._core.step_time.stages = stages
        self._num_steps = self._core.num_steps
        _reset_side_effects(self._core)


def _measure_ms(core: EngineCore, num_prompts: int, num_tokens: int, credible_ms: float = math.inf) -> float:
    """Return the faster of two runs, in milliseconds; a slow run of at most `credible_ms` is not repeated.

    The first run includes the one-time preparation of its shape. A run during which the process did not get the
    processor would make all larger steps, which are extrapolated, look too slow to be measured.
    """
    ms = _run_prompts(core, num_prompts, num_tokens).load.step_ms
    if SLOW_STEP_MS < ms <= credible_ms:
        return ms
    return min(ms, _run_prompts(core, num_prompts, num_tokens).load.step_ms)


def _max_prompts_per_step(core: EngineCore) -> int:
    """Return how many prompts of one token a step can take."""
    limits, info = core.scheduler.limits, core.runner.info
    return 1 if info.pooling is not None else min(limits.max_num_seqs, limits.max_num_waiting, info.num_blocks // 2)


def _estimated_ms(sample_ms: dict[int, float], size: int) -> float:
    """Return the time of the next larger measured size, or one extrapolated from the two largest."""
    larger = [known for known in sample_ms if known >= size]
    if larger:
        return sample_ms[min(larger)]
    first, second = sorted(sample_ms)[-2:]
    slope_ms = (sample_ms[second] - sample_ms[first]) / (second - first)
    return sample_ms[second] + max(0.0, slope_ms) * (size - second)


def _run_prompts(core: EngineCore, num_prompts: int, num_tokens: int) -> StepOutputs:
    """Run one step of `num_prompts` prompts of `num_tokens` tokens each."""
    vocab_size, pooling = core.runner.info.vocab_size, core.runner.info.pooling
    for number in range(num_prompts):
        core.add(
            GenerateRequest(
                request_id=f"warmup-{number}",
                model="",
                prompt_token_ids=[(1 + index * _TOKEN_STRIDE) % vocab_size for index in range(num_tokens)],
                sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
                cache_salt="warmup",
                pooling=None if pooling is None else PoolingParams(pooling.task),
            )
        )
    step = core.step()
    core.scheduler.kv.reset_prefix_cache()
    return step


def _reset_side_effects(core: EngineCore) -> None:
    core.scheduler.kv.drain_events()
    core.scheduler.reset_preemptions()
    core.check_integrity()


_NAME = "probe"


def probe(core: EngineCore) -> None:
    """Compute one token, to find out whether the device works when steps keep failing.

    Raises what the runner raises; does nothing if no block is free. Call this with no step in flight.
    """
    with core.scheduler.kv.spare_blocks() as block_ids:
        if block_ids:
            _compute_a_token(core, block_ids)


def _compute_a_token(core: EngineCore, block_ids: list[int]) -> None:
    pooling = core.runner.info.pooling
    sequence = AdmittedSequence(
        _NAME,
        [0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        tables=[HeldBlocks(0, [block_id]) for block_id in block_ids],
        sampling=SamplingParams(temperature=0.0),
        choice=0,
        seed=0,
        pooling=None if pooling is None else PoolingParams(pooling.task),
    )
    plan = StepPlan(step=0, num_scheduled_tokens={_NAME: 1}, admitted=[sequence], samples={_NAME})
    plan.released = core.scheduler.swap_released([_NAME])
    core.runner.wait(core.runner.launch(plan))

"""Before ready: the engine generates a token, then measures how long small steps take, and larger ones once it is idle.

It runs through the whole core, so requests use what was tested here. It leaves nothing behind: no cached prefix, no
counters. The measurements are the step-time model's prior; requests refine it.
"""

from __future__ import annotations

import time
from collections import deque

from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.pooling import PoolingParams
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.step_time import StepSample, StepTimeModel, default_knots

CPU_LIMIT_S = 0.05
"""Before ready; the rest is measured while no request has come."""
DEVICE_LIMIT_S = 0.8
"""On a device, whose first step of a size also prepares it."""
LONGEST_STEP_MS = 300.0
"""Of one step after ready."""
SLOW_STEP_MS = 100.0
FEW = 16
"""Of the sizes that are always measured the larger one, where native kernels work as for hundreds of tokens."""
_SKIPPED_SIZES = {4}
"""Between 1 and 8 tokens a line is accurate enough for a prior."""
_TOKEN_STRIDE = 7919
"""Spreads probe tokens over the vocabulary."""


class SelfTestError(RuntimeError):
    """The engine loaded but cannot generate."""


def self_test(core: EngineCore) -> None:
    """Generate one token, or pool one. Raises `SelfTestError` with what happened instead."""
    for output in _run_prompts(core, 1, 1).outputs:
        if output.error is not None:
            raise SelfTestError(output.error)
        if any(not 0 <= token_id < core.runner.info.vocab_size for token_id in output.token_ids):
            raise SelfTestError(f"the model produced token ids {output.token_ids}, which it does not have")
        if output.token_ids or output.pooled:
            _leave_no_trace(core)
            return
    raise SelfTestError("the model produced nothing")


class Calibration:
    """Step times by size, from prompts that no client sent, and how much longer as many decodes take: the prior of the
    step-time model. Sizes larger than what was measured are on a line.

    Context costs are learned from requests: prompts without a context cannot separate them from the cost of tokens.
    """

    def __init__(self, core: EngineCore) -> None:
        limits = core.scheduler.limits
        self._core = core
        self._largest = largest = min(limits.max_num_batched_tokens, limits.max_total_tokens - 1)
        sizes = sorted(default_knots(largest), key=lambda size: (size > FEW, size not in (1, FEW), size))
        self._left = deque(size for size in sizes if size not in _SKIPPED_SIZES or size == largest)
        self._sample_ms: dict[int, float] = {}
        self._decode_ms: float | None = None
        """What one decode takes beyond a prompt's token; `None`: not measured."""
        self._num_steps = 0
        """Of the core, when the last size was measured."""

    def begin(self, limit_s: float | None = None) -> None:
        """Measure sizes for about `limit_s` seconds (by default what the device is worth); what would take longer is
        left. At least two are measured: fewer would not show how time grows."""
        if limit_s is None:
            limit_s = CPU_LIMIT_S if self._core.runner.info.device == "cpu" else DEVICE_LIMIT_S
        end_s = time.monotonic() + limit_s
        while self._has_more and (len(self._sample_ms) < 2 or self._expected_ms() <= (end_s - time.monotonic()) * 1000):
            self._measure()
        self._fit()

    def go_on(self) -> bool:
        """Measure one thing more, where the core has no work. False: no more is measured, because all is, because it
        would keep a request waiting for long, or because there were requests, from which the model learns."""
        if not self._has_more or self._core.num_steps != self._num_steps or self._expected_ms() > LONGEST_STEP_MS:
            return False
        self._measure()
        self._fit()
        return True

    @property
    def _has_more(self) -> bool:
        return bool(self._left) or self._decodes_are_next

    @property
    def _decodes_are_next(self) -> bool:
        return self._decode_ms is None and FEW in self._sample_ms and _most_at_once(self._core) >= FEW

    def _expected_ms(self) -> float:
        return self._sample_ms[FEW] if self._decodes_are_next else _estimated_ms(self._sample_ms, self._left[0])

    def _measure(self) -> None:
        if self._decodes_are_next:
            self._decode_ms = max(0.0, _measure_ms(self._core, FEW, 1) - self._sample_ms[FEW]) / (FEW - 1)
            return
        size = self._left.popleft()
        self._sample_ms[size] = _measure_ms(self._core, 1, size)

    def _fit(self) -> None:
        samples = [StepSample(size, 0, 0, ms) for size, ms in self._sample_ms.items()]
        self._core.step_time = StepTimeModel.from_calibration(samples, self._largest, self._decode_ms or 0.0)
        self._num_steps = self._core.num_steps
        _leave_no_trace(self._core)


def _measure_ms(core: EngineCore, num_prompts: int, num_tokens: int) -> float:
    """The faster of two runs; a slow one is not repeated. The first run includes the one-time preparation of its
    shape."""
    ms = _run_prompts(core, num_prompts, num_tokens).load.step_ms
    return ms if ms > SLOW_STEP_MS else min(ms, _run_prompts(core, num_prompts, num_tokens).load.step_ms)


def _most_at_once(core: EngineCore) -> int:
    """Prompts of one token that one step may hold."""
    limits, info = core.scheduler.limits, core.runner.info
    return 1 if info.pooling is not None else min(limits.max_num_seqs, limits.max_num_waiting, info.num_blocks // 2)


def _estimated_ms(sample_ms: dict[int, float], size: int) -> float:
    """As the next larger size, or on the line through the two largest."""
    larger = [known for known in sample_ms if known >= size]
    if larger:
        return sample_ms[min(larger)]
    first, second = sorted(sample_ms)[-2:]
    slope_ms = (sample_ms[second] - sample_ms[first]) / (second - first)
    return sample_ms[second] + max(0.0, slope_ms) * (size - second)


def _run_prompts(core: EngineCore, num_prompts: int, num_tokens: int) -> StepOutputs:
    """One step of so many prompts of so many tokens."""
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


def _leave_no_trace(core: EngineCore) -> None:
    core.scheduler.kv.prefix_cache.drain_events()
    core.scheduler.num_preemptions = 0
    core.check_integrity()

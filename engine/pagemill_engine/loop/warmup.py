"""Before ready: the engine generates a token, then measures how long small steps take, and larger ones once it is idle.

It runs through the whole core, so requests use what was tested here. It leaves nothing behind: no cached prefix, no
counters. The measurements are the step-time model's prior; requests refine it.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

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
_SKIPPED_SIZES = {8}
"""Between 1 and 32 tokens a line is accurate enough for a prior."""
_TOKEN_STRIDE = 7919
"""Spreads probe tokens over the vocabulary."""


class SelfTestError(RuntimeError):
    """The engine loaded but cannot generate."""


def self_test(core: EngineCore) -> None:
    """Generate one token, or pool one. Raises `SelfTestError` with what happened instead."""
    for output in _run_prompt(core, 1).outputs:
        if output.error is not None:
            raise SelfTestError(output.error)
        if any(not 0 <= token_id < core.runner.info.vocab_size for token_id in output.token_ids):
            raise SelfTestError(f"the model produced token ids {output.token_ids}, which it does not have")
        if output.token_ids or output.pooled:
            _leave_no_trace(core)
            return
    raise SelfTestError("the model produced nothing")


class Calibration:
    """Step times by size, from prompts that no client sent: the prior of the step-time model.

    Context costs are learned from requests, since the short prompts measured here cannot separate them from the cost of
    tokens.
    """

    def __init__(self, core: EngineCore) -> None:
        limits = core.scheduler.limits
        largest = min(limits.max_num_batched_tokens, limits.max_total_tokens - 1)
        self._core = core
        self._knots = default_knots(largest)
        self._left = deque(size for size in self._knots if size not in _SKIPPED_SIZES or size == largest)
        self._samples: list[StepSample] = []
        self._num_steps = 0
        """Of the core, when the last size was measured."""

    def begin(self, limit_s: float | None = None) -> None:
        """Measure growing sizes for about `limit_s` seconds (by default what the device is worth); those that would
        take longer are left. At least two are measured: fewer would not show how time grows."""
        if limit_s is None:
            limit_s = CPU_LIMIT_S if self._core.runner.info.device == "cpu" else DEVICE_LIMIT_S
        end_s = time.monotonic() + limit_s
        while self._left and (len(self._samples) < 2 or self._expected_ms() <= (end_s - time.monotonic()) * 1000):
            self._measure()
        self._fit()

    def go_on(self) -> bool:
        """Measure one more size, where the core has no work. False: no more is measured, because all is, because it
        would keep a request waiting for long, or because there were requests, from which the model learns."""
        if not self._left or self._core.num_steps != self._num_steps or self._expected_ms() > LONGEST_STEP_MS:
            return False
        self._measure()
        self._fit()
        return True

    def _expected_ms(self) -> float:
        return _line_through(self._samples[-2], self._samples[-1], self._left[0])

    def _measure(self) -> None:
        num_tokens = self._left.popleft()
        self._samples.append(StepSample(num_tokens, 0, 0, _measure_ms(self._core, num_tokens)))

    def _fit(self) -> None:
        self._core.step_time = _with_knots(StepTimeModel.from_calibration(self._samples), self._knots)
        self._num_steps = self._core.num_steps
        _leave_no_trace(self._core)


def _measure_ms(core: EngineCore, num_tokens: int) -> float:
    """The faster of two runs; a slow one is not repeated. The first run includes the one-time preparation of its
    shape."""
    ms = _run_prompt(core, num_tokens).load.step_ms
    return ms if ms > SLOW_STEP_MS else min(ms, _run_prompt(core, num_tokens).load.step_ms)


def _line_through(first: StepSample, second: StepSample, num_tokens: int) -> float:
    slope = (second.ms - first.ms) / (second.num_tokens - first.num_tokens)
    return second.ms + max(0.0, slope) * (num_tokens - second.num_tokens)


def _with_knots(model: StepTimeModel, knots_tokens: list[int]) -> StepTimeModel:
    """The same predictions at more knots, so that requests can refine sizes that were not measured."""
    knot_ms = [model.predict_ms(knot) for knot in knots_tokens]
    return StepTimeModel.from_params(
        msgspec.structs.replace(model.params(), knots_tokens=knots_tokens, knot_ms=knot_ms)
    )


def _run_prompt(core: EngineCore, num_tokens: int) -> StepOutputs:
    vocab_size, pooling = core.runner.info.vocab_size, core.runner.info.pooling
    core.add(
        GenerateRequest(
            request_id="warmup",
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

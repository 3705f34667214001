"""Before ready: the engine generates a token, then measures how long steps of several sizes take.

It runs through the whole core, so requests use what was tested here. It leaves nothing behind: no cached prefix, no
counters. The measurements are the step-time model's prior; requests refine it.
"""

from __future__ import annotations

import time

from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.pooling import PoolingParams
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.step_time import StepSample, StepTimeModel, default_knots

SWEEP_LIMIT_S = 0.8
SLOW_STEP_MS = 100.0
_SKIPPED_SIZES = {4}
"""Between 1 and 8 tokens a line is accurate enough for a prior."""
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


def calibrate(core: EngineCore, limit_s: float = SWEEP_LIMIT_S) -> None:
    """Measure prefill steps of growing size for about `limit_s` seconds; sizes that would take longer are skipped.

    At least two sizes are measured: fewer would not show how time grows; larger ones than were reached are on a line.
    Context costs are learned from requests: prompts without a context cannot separate them from the cost of tokens.
    """
    limits = core.scheduler.limits
    largest = min(limits.max_num_batched_tokens, limits.max_total_tokens - 1)
    samples: list[StepSample] = []
    started_s = time.monotonic()
    for num_tokens in [size for size in default_knots(largest) if size not in _SKIPPED_SIZES or size == largest]:
        left_ms = (limit_s - (time.monotonic() - started_s)) * 1000
        if len(samples) > 1 and _line_through(samples[-2], samples[-1], num_tokens) > left_ms:
            break
        samples.append(_measure(core, num_tokens))
    core.step_time = StepTimeModel.from_calibration(samples, largest)
    _leave_no_trace(core)


def _measure(core: EngineCore, num_tokens: int) -> StepSample:
    """The faster of two runs; a slow one is not repeated. The first run includes the one-time preparation of its
    shape."""
    ms = _run_prompt(core, num_tokens).load.step_ms
    ms = ms if ms > SLOW_STEP_MS else min(ms, _run_prompt(core, num_tokens).load.step_ms)
    return StepSample(num_tokens, 0, 0, ms)


def _line_through(first: StepSample, second: StepSample, num_tokens: int) -> float:
    slope = (second.ms - first.ms) / (second.num_tokens - first.num_tokens)
    return second.ms + max(0.0, slope) * (num_tokens - second.num_tokens)


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

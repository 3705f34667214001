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


def calibrate(core: EngineCore, limit_s: float = SWEEP_LIMIT_S) -> None:
    """Measure prompts of several sizes for about `limit_s` seconds, and how much longer as many decodes take.

    At least two sizes are measured: fewer would not show how time grows; larger ones than were reached are on a line.
    Context costs are learned from requests: prompts without a context cannot separate them from the cost of tokens.
    """
    limits = core.scheduler.limits
    largest = min(limits.max_num_batched_tokens, limits.max_total_tokens - 1)
    sizes = sorted(default_knots(largest), key=lambda size: (size > FEW, size not in (1, FEW), size))
    deadline_s = time.monotonic() + limit_s
    sample_ms: dict[int, float] = {}
    decode_ms = 0.0
    for size in [size for size in sizes if size not in _SKIPPED_SIZES or size == largest]:
        left_ms = (deadline_s - time.monotonic()) * 1000
        if len(sample_ms) > 1 and _estimated_ms(sample_ms, size) > left_ms:
            break
        sample_ms[size] = _measure_ms(core, 1, size)
        if size == FEW <= _most_at_once(core) and sample_ms[size] < (deadline_s - time.monotonic()) * 1000:
            decode_ms = max(0.0, _measure_ms(core, size, 1) - sample_ms[size]) / (size - 1)
    samples = [StepSample(size, 0, 0, ms) for size, ms in sample_ms.items()]
    core.step_time = StepTimeModel.from_calibration(samples, largest, decode_ms)
    _leave_no_trace(core)


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

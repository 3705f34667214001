"""Before ready: the engine really generates a token, then measures how long steps of several sizes take.

Runs through the whole core, so what passes here is what requests will use. Leaves nothing behind: no cached prefix, no
counter. The sweep is the step-time model's prior; requests refine it.
"""

from __future__ import annotations

import time

from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.step_time import StepSample, StepTimeModel, default_knots

from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore

SWEEP_LIMIT_S = 0.8
_TOKEN_STRIDE = 7919
"""Spreads probe tokens over the vocabulary."""


class SelfTestError(RuntimeError):
    """The engine loaded and cannot generate."""


def self_test(core: EngineCore) -> None:
    """Generate one token. Raises `SelfTestError` with what came instead."""
    for output in _run_prompt(core, 1).outputs:
        if output.error is not None:
            raise SelfTestError(output.error)
        if any(not 0 <= token_id < core.runner.info.vocab_size for token_id in output.token_ids):
            raise SelfTestError(f"the model produced token ids {output.token_ids}, which it does not have")
        if output.token_ids:
            _leave_no_trace(core)
            return
    raise SelfTestError("the model produced no token")


def calibrate(core: EngineCore, limit_s: float = SWEEP_LIMIT_S) -> None:
    """Measure prefill steps of growing size for about `limit_s` seconds; a size that would take longer is left out."""
    largest = min(core.config.max_num_batched_tokens, core.scheduler.limits.max_total_tokens - 1)
    samples: list[StepSample] = []
    started_s = time.monotonic()
    for num_tokens in default_knots(largest):
        left_s = limit_s - (time.monotonic() - started_s)
        if samples and samples[-1].ms * num_tokens / samples[-1].num_tokens > left_s * 1000:
            break
        # The first run of a size pays for what the device prepares once per shape.
        for _ in range(2 if not samples or samples[-1].ms < 50 else 1):
            step = _run_prompt(core, num_tokens)
            ms = step.load.step_ms
        samples.append(StepSample(num_tokens, 0, num_tokens * num_tokens, ms))
    core.step_time = StepTimeModel.from_calibration(samples)
    _leave_no_trace(core)


def _run_prompt(core: EngineCore, num_tokens: int) -> StepOutputs:
    vocab_size = core.runner.info.vocab_size
    core.add(
        GenerateRequest(
            request_id="warmup",
            model="",
            prompt_token_ids=[(1 + index * _TOKEN_STRIDE) % vocab_size for index in range(num_tokens)],
            sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            cache_salt="warmup",
        )
    )
    step = core.step()
    core.scheduler.kv.reset_prefix_cache()
    return step


def _leave_no_trace(core: EngineCore) -> None:
    core.scheduler.kv.prefix_cache.drain_events()
    core.scheduler.num_preemptions = 0
    core.check_integrity()

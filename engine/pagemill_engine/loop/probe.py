"""Computes one token outside all requests, to find out whether the device works when steps keep failing.

`loop.process` decides when, and what follows.
"""

from __future__ import annotations

from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.step import AdmittedSequence, StepPlan
from pagemill_protocol.sampling import SamplingParams

_NAME = "probe"


def probe(core: EngineCore) -> None:
    """Call with no step in flight. Raises what the runner raises; skipped if no block is free."""
    pool = core.scheduler.kv.pool
    if pool.num_free == 0:
        return
    blocks = pool.allocate(1)
    sequence = AdmittedSequence(_NAME, [0], 1, 0, [blocks[0].block_id], SamplingParams(temperature=0.0), 0, 0)
    plan = StepPlan(step=0, num_scheduled_tokens={_NAME: 1}, admitted=[sequence], samples={_NAME})
    plan.released = core.scheduler.swap_released([_NAME])
    try:
        core.runner.wait(core.runner.launch(plan))
    finally:
        pool.release(blocks)

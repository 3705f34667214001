"""Computes one token outside all requests, to find out whether the device works when steps keep failing.

`loop.process` decides when to probe and what follows.
"""

from __future__ import annotations

from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.step import AdmittedSequence, StepPlan
from pagemill_protocol.pooling import PoolingParams
from pagemill_protocol.sampling import SamplingParams

_NAME = "probe"


def probe(core: EngineCore) -> None:
    """Compute one token. Raises what the runner raises; does nothing if no block is free.

    Call this with no step in flight.
    """
    pool = core.scheduler.kv.pool
    if pool.num_free == 0:
        return
    blocks = pool.allocate(1)
    pooling = core.runner.info.pooling
    sequence = AdmittedSequence(
        _NAME,
        [0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[blocks[0].block_id],
        sampling=SamplingParams(temperature=0.0),
        choice=0,
        seed=0,
        pooling=None if pooling is None else PoolingParams(pooling.task),
    )
    plan = StepPlan(step=0, num_scheduled_tokens={_NAME: 1}, admitted=[sequence], samples={_NAME})
    plan.released = core.scheduler.swap_released([_NAME])
    try:
        core.runner.wait(core.runner.launch(plan))
    finally:
        pool.release(blocks)

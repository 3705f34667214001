"""One token computed beside all requests: whether the device still works, when step after step has failed.

Who asks and what follows is `loop.process`'s.
"""

from __future__ import annotations

from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.step import AdmittedRow, StepPlan
from pagemill_protocol.sampling import SamplingParams

_NAME = "probe"


def probe(core: EngineCore) -> None:
    """With no step in flight; raises what the runner raises, or is skipped when no block is free."""
    pool = core.scheduler.kv.pool
    if pool.num_free == 0:
        return
    blocks = pool.allocate(1)
    row = AdmittedRow(_NAME, [0], 1, 0, [blocks[0].block_id], SamplingParams(temperature=0.0), 0, 0)
    plan = StepPlan(step=0, num_scheduled_tokens={_NAME: 1}, admitted=[row], samples={_NAME})
    plan.released = core.scheduler.swap_released([_NAME])
    try:
        core.runner.wait(core.runner.launch(plan))
    finally:
        pool.release(blocks)

"""A core's way to sleep and back: what its runner gives up, and what of the bookkeeping goes with it.

When it is time, `loop.process` says.
"""

from __future__ import annotations

from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import self_test


def fall_asleep(core: EngineCore) -> tuple[int, StepOutputs]:
    """With no work left. Bytes that are free now, and the news of what is cached no longer.

    Raises `runner.sleep.SleepError`: nothing has changed then.
    """
    num_bytes = core.runner.sleep()
    core.scheduler.kv.reset_prefix_cache()
    return num_bytes, core.step()


def wake_up(core: EngineCore) -> None:
    """As at the start, a first token proves that all is there. Raises what allocating raises, or `SelfTestError`."""
    core.runner.wake()
    self_test(core)

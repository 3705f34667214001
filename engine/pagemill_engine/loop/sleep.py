"""Puts an engine core to sleep and wakes it: frees the runner's memory and empties the prefix cache.

`loop.process` decides when.
"""

from __future__ import annotations

from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import self_test


def release_memory(core: EngineCore) -> tuple[int, StepOutputs]:
    """Free the runner's memory. Call this when there is no work left.

    Returns the number of freed bytes, and the outputs that report the emptied prefix cache. Raises
    `runner.sleep.SleepError` if the runner cannot sleep; nothing has changed then.
    """
    num_bytes = core.runner.sleep()
    core.scheduler.kv.reset_prefix_cache()
    return num_bytes, core.step()


def wake_up(core: EngineCore) -> None:
    """Allocate memory again and generate a first token. Raises what allocating raises, or `SelfTestError`."""
    core.runner.wake()
    self_test(core)

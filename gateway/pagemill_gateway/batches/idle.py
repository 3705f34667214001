"""Decides when a line of a batch may start: while no live request waits and an engine of its model has capacity left.

The brain counts the idle engines. Its answer is reused for `POLL_S`, less the lines started in
that time, because engines do not report those yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pagemill_routing.brain.interface import Brain

POLL_S = 0.05


class IdleCapacity:
    def __init__(self, brain: Brain, max_load: float, is_draining: Callable[[], bool]) -> None:
        self._brain = brain
        self._max_load = max_load
        self._is_draining = is_draining
        self._left: dict[str, int] = {}
        """The number of lines that may still start, by model, from the brain's last answers."""
        self._asked_at = 0.0

    async def wait(self, model: str) -> None:
        """Return when one line of `model` may start."""
        may_start = False
        while not may_start:
            may_start = not self._is_draining() and await self._take(model)
            if not may_start:
                await asyncio.sleep(POLL_S)

    async def _take(self, model: str) -> bool:
        now = time.monotonic()
        if now - self._asked_at >= POLL_S:
            self._left.clear()
            self._asked_at = now
        if model not in self._left:
            found = await self._brain.idle_capacity(model, self._max_load)
            self._left.setdefault(model, found)
        self._left[model] -= 1
        return self._left[model] >= 0

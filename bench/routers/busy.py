"""The simulated activity of a busy pod that its gateways receive: a full prefix cache, and steps that change it.

It needs no client: the load is reported, but its tokens are not generated. `pod` writes the frames.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import NamedTuple

import msgspec

from routers.pod import STEP_TIME, Pod

NUM_ROWS = 48
"""Requests that a busy pod reports as running."""
NUM_CONTEXT_TOKENS = NUM_ROWS * 1500
HASH_BYTES = 16
FIT_INTERVAL_S = 0.5
"""Seconds between new fits of the step time, as engines report them."""
FIT_SPREAD = 0.02


class Habit(NamedTuple):
    num_prefix_chunks: int = 0
    """Prefix chunks in the prefix cache from the start."""
    num_shared: int = 0
    """The prefix chunks among them that all pods share, as of system prompts; they are never evicted."""
    steps_per_s: float = 0.0
    churn: int = 0
    """Prefix chunks that each step adds and evicts."""


class Busy:
    def __init__(self, pod: Pod, habit: Habit, loop: asyncio.AbstractEventLoop) -> None:
        self._pod = pod
        self._habit = habit
        self._loop = loop
        self._draw = random.Random()
        self._own = deque(_prefix_chunks(self._draw, habit.num_prefix_chunks - habit.num_shared))
        """The pod's own prefix chunks, oldest first."""
        self._fit_at = 0.0

    def begin(self) -> None:
        habit = self._habit
        if habit.num_prefix_chunks:
            self._pod.exchange([*self._own, *_prefix_chunks(random.Random(0), habit.num_shared)], [])
        if habit.steps_per_s:
            self._pod.play(NUM_ROWS, NUM_CONTEXT_TOKENS, STEP_TIME)
            # Pods begin at random times, because the steps of real pods are not synchronized.
            self._loop.call_later(random.random() / habit.steps_per_s, self._step)

    def _step(self) -> None:
        now = self._loop.time()
        if now - self._fit_at >= FIT_INTERVAL_S:
            self._fit_at = now
            factor = random.uniform(1 - FIT_SPREAD, 1 + FIT_SPREAD)
            knots = [ms * factor for ms in STEP_TIME.knot_ms]
            self._pod.play(0, 0, msgspec.structs.replace(STEP_TIME, knot_ms=knots))
        added = _prefix_chunks(self._draw, self._habit.churn)
        removed = [self._own.popleft() for _ in added]
        self._own += added
        self._pod.exchange(added, removed)
        self._loop.call_later(1 / self._habit.steps_per_s, self._step)


def _prefix_chunks(draw: random.Random, count: int) -> list[bytes]:
    return [draw.randbytes(HASH_BYTES) for _ in range(count)]

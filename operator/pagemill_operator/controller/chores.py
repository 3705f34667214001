"""Work of the leader that comes back by the clock, and is tried until it succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

from pagemill_operator.backends.kubernetes.client import ApiError, NotLeading, Unreachable

logger = logging.getLogger("pagemill.operator")

Chore = Callable[[], Awaitable[float]]
"""Does it, and returns the seconds until it is due again. May raise `ApiError`, `Unreachable` and `NotLeading`."""


async def insist(name: str, chore: Chore, retry_s: float) -> float:
    """Try until it succeeds; returns the seconds until it is due again."""
    while True:
        try:
            return await chore()
        except (ApiError, Unreachable, NotLeading) as error:
            logger.warning("%s: %s", name, error or type(error).__name__)
        await asyncio.sleep(random.uniform(0.5, 1.0) * retry_s)


async def repeat(name: str, chore: Chore, retry_s: float, first_s: float, at_once: asyncio.Event | None = None) -> None:
    """For ever, the first time in `first_s`, and whenever `at_once` is set; the chore clears it."""
    at_once = at_once or asyncio.Event()
    pause_s = first_s
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await at_once.wait()
        pause_s = await insist(name, chore, retry_s)

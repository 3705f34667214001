"""Threads of an HTTP server that parse, render and tokenize bodies, so that its event loop is not blocked.

Large bodies take turns on one thread of their own: only one at a time uses memory for tokenizing, and small bodies
never wait for them. `pagemill_api.text.fitting` bounds how much a single text may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_BODY_BYTES = 256 * 1024

T = TypeVar("T")


class PreparationThreads:
    def __init__(self, num_threads: int) -> None:
        """Start the threads. `num_threads`: threads for bodies that are not large."""
        self._small = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="prepare-large")

    async def run(self, work: Callable[[], T], body_bytes: int) -> T:
        """Return the result of `work`. Work whose caller is cancelled before its turn is not started."""
        pool = self._large if body_bytes > LARGE_BODY_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Let running work finish and cancel the rest."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)

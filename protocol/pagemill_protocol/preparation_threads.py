"""Threads of a front door on which bodies are parsed, rendered and tokenized, so that its event loop goes on.

Large bodies have a thread of their own and take turns: the memory that tokenizing takes is that of one of them, and
small bodies never wait for them. How much a single text may take is bounded in `text.fitting`.
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
        """`num_threads`: for bodies that are not large."""
        self._small = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="prepare-large")

    async def run(self, work: Callable[[], T], body_bytes: int) -> T:
        """What `work` returns. One whose caller is cancelled before its turn is not begun."""
        pool = self._large if body_bytes > LARGE_BODY_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Work that has begun ends, nothing else begins."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)

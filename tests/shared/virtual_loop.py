"""An event loop whose time advances only when all tasks wait, so that long pauses cost only their work.

It is for code that uses the time of its loop or a given clock, without sockets and threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class _Selector(selectors.SelectSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait for something that will never happen")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, Value]) -> Value:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

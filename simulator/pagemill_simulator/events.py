"""What happens in a simulation, in the order of its virtual time, and coroutines of the real code that wait in it.

`Events` is the clock and the list of what is due. `EventsLoop` is an asyncio event loop whose time is that clock: what
the gateway's code awaits (a queue, news, a timeout, a sleep) passes in virtual seconds, without any I/O. Two runs give
the same order: what is due at one instant comes in the order in which it was asked for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVarTuple

Arguments = TypeVarTuple("Arguments")


class Events:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Seconds; a clock for those who want one."""
        return self.now_s

    @property
    def next_s(self) -> float | None:
        """When the next event is due."""
        return self._due[0][0] if self._due else None

    def at(self, instant_s: float, event: Callable[[], object]) -> None:
        """Let `event` happen then; now, where that has passed."""
        heapq.heappush(self._due, (max(instant_s, self.now_s), next(self._order), event))

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._order), event))

    def step(self) -> None:
        """The next event. Raises `IndexError` when nothing is due any more."""
        self.now_s, _, event = heapq.heappop(self._due)
        event()


class EventsLoop(asyncio.BaseEventLoop):
    """As much of an event loop as tasks, futures, timeouts and sleeps need. Whoever runs the events calls `run_ready`.

    A failure of a task or a callback is the simulation's failure: `run_ready` raises it.
    """

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events
        self._due_now: deque[asyncio.Handle] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run it to its end."""
        task = self.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def run_ready(self) -> None:
        """Everything that can go on at this instant."""
        due = self._due_now
        if not due:
            return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while due:
                handle = due.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(before)

    def close(self) -> None:
        """Whoever still waits never hears of it."""
        for task in self._tasks:
            task.remove_done_callback(self._ended)
            task.cancel()
        self.run_ready()
        super().close()

    def time(self) -> float:
        return self._events.now_s

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due_now.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._events.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._events.at(when, lambda: self._due_now.append(handle))
        return handle

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context.get("exception") or RuntimeError(context["message"])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays among the events, and does nothing when it is due."""

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

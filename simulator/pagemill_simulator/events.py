"""Events of a simulation in the order of its virtual time, and an event loop for real coroutines in that time.

`Events` is the clock and the queue of due events. `EventsLoop` is an asyncio event loop whose time is that clock: what
the gateway's code awaits (a queue, a condition, a timeout, a sleep) passes in virtual seconds, without any I/O. Two
runs have the same order: events due at one instant run in the order in which they were added.
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
        """Return the time in seconds; usable as a clock function."""
        return self.now_s

    @property
    def next_s(self) -> float | None:
        """The time of the next event; None if there is none."""
        return self._due[0][0] if self._due else None

    def at(self, instant_s: float, event: Callable[[], object]) -> None:
        """Schedule `event` for the instant, or for now if that has passed."""
        if instant_s < self.now_s:
            instant_s = self.now_s
        heapq.heappush(self._due, (instant_s, next(self._order), event))

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._order), event))

    def step(self) -> None:
        """Run the next event. Raise `IndexError` if nothing is due."""
        self.now_s, _, event = heapq.heappop(self._due)
        event()


class EventsLoop(asyncio.BaseEventLoop):
    """The part of an event loop that tasks, futures, timeouts and sleeps need. The code that runs the events calls
    `run_ready`.

    An error of a task or a callback is the simulation's error: `run_ready` raises it.
    """

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events
        self._due_now: deque[asyncio.Handle] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to its end."""
        task = self.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def run_ready(self) -> None:
        """Run everything that can continue at this instant."""
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
        """Cancel the waiting tasks."""
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
        """Do nothing: the event stays in the queue and has no effect when it is due."""

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

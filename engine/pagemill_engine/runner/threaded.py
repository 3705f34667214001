"""Runs the steps of a synchronous runner on a thread, in order, so that they overlap with the loop.

Everything of the inner runner is used on that thread only. It is for the CPU; a device with queues of its own needs
none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pagemill_engine.runner.base import Runner
from pagemill_engine.runner.errors import StepSkippedError
from pagemill_engine.scheduler.step import StepPlan, StepResult


class ThreadedRunner:
    def __init__(self, inner: Runner, prepare_thread: Callable[[], object] | None = None) -> None:
        """Start the thread. `prepare_thread` is called on it before its first step: torch has per-thread settings."""
        self.info = inner.info._replace(overlaps=True)
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner", initializer=prepare_thread)
        self._unread: Future[StepResult] | None = None

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        self._unread = self._thread.submit(self._run, plan, self._unread)
        return self._unread

    def wait(self, handle: Any) -> StepResult:
        future: Future[StepResult] = handle
        try:
            return future.result()
        finally:
            if self._unread is future:
                self._unread = None

    def sleep(self) -> int:
        return self._thread.submit(self._inner.sleep).result()

    def wake(self) -> None:
        self._thread.submit(self._inner.wake).result()

    def close(self) -> None:
        """Wait for the running step and close the inner runner."""
        self._thread.shutdown(cancel_futures=True)
        self._inner.close()

    def _run(self, plan: StepPlan, before: Future[StepResult] | None) -> StepResult:
        if before is not None and before.exception() is not None:
            raise StepSkippedError(f"step {plan.step} was not run: the one before it failed")
        return self._inner.wait(self._inner.launch(plan))

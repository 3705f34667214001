"""Workers that take keys from the queue and reconcile them, a bounded number concurrently. An error affects one key."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from pagemill_kube.errors import ApiError, NotLeading, Unreachable
from pagemill_operator.controller.leading.queue import WorkQueue
from pagemill_operator.controller.leading.reconcile import Reconciler
from pagemill_operator.controller.reporting.metrics import OperatorMetrics

logger = logging.getLogger("pagemill.operator")

TRANSIENT_RETRY_MAX_S = 4.0
"""Longest pause in seconds while the API server is away, so that everything is reconciled soon after its return."""
PERMANENT_RETRY_MAX_S = 60.0
"""Longest pause in seconds between tries of what the API server refuses, for example because of a quota."""


class Workers:
    def __init__(
        self, queue: WorkQueue, reconciler: Reconciler, metrics: OperatorMetrics, *, count: int, resync_s: float
    ) -> None:
        self._queue = queue
        self._reconciler = reconciler
        self._metrics = metrics
        self._count = count
        self._resync_s = resync_s

    async def run(self) -> None:
        """Work until cancelled, or until this process may not write any more."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._work(), name=f"worker:{number}")

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            started = time.perf_counter()
            try:
                result = await self._turn(key)
            finally:
                self._queue.finish(key)
            self._metrics.reconciled(result, time.perf_counter() - started)

    async def _turn(self, key: str) -> str:
        """Reconcile one key; return the result as the metrics call it."""
        try:
            again_s = await self._reconciler.reconcile(key)
        except KeyError:
            if await self._reconciler.forget(key):
                self._queue.forget(key)
            return "success"
        except NotLeading:
            # The election ends the process; until then there is nothing to do.
            self._queue.add(key, TRANSIENT_RETRY_MAX_S)
            return "requeue"
        except (ApiError, Unreachable) as error:
            pause_s = self._queue.add_failed(key, TRANSIENT_RETRY_MAX_S)
            logger.info("reconciling %s failed, trying again in %.1f s: %s", key, pause_s, error)
            return "error"
        except Exception:
            pause_s = self._queue.add_failed(key)
            logger.exception("reconciling %s failed, trying again in %.1f s", key, pause_s)
            return "error"
        if self._reconciler.has_permanent_errors(key):
            self._queue.add_failed(key, PERMANENT_RETRY_MAX_S)
            return "error"
        self._queue.succeeded(key)
        resync_s = self._resync_s * random.uniform(0.9, 1.1)
        self._queue.add(key, resync_s if again_s is None else again_s)
        return "success" if again_s is None else "requeue"

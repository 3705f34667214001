"""Keeps the load of each deployment over the last quarter of an hour, for the plots of the page `/ui`.

It lives in the control process, and is empty again after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import orjson

from pagemill_gateway.ports import PlotPoint
from pagemill_protocol.report.load import DeploymentLoad
from pagemill_routing.brain.reading import Reader

INTERVAL_S = 5.0
KEPT_S = 15 * 60.0


class LoadHistory:
    def __init__(self, reader: Reader, unix_s: Callable[[], float] = time.time) -> None:
        self._reader = reader
        self._unix_s = unix_s
        self._samples: deque[PlotPoint] = deque(maxlen=int(KEPT_S / INTERVAL_S))
        self._num_taken = 0

    async def run(self) -> None:
        """Take a sample at each interval, until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(INTERVAL_S)

    def take(self) -> None:
        loads = {each.key: describe_load(each) for each in self._reader.load()}
        self._num_taken += 1
        self._samples.append(PlotPoint(self._num_taken, round(self._unix_s(), 1), orjson.dumps(loads)))

    def after(self, number: int) -> list[PlotPoint]:
        """Return the samples with higher numbers, oldest first."""
        return [each for each in self._samples if each.number > number]


def describe_load(load: DeploymentLoad) -> dict[str, float | None]:
    """Return the load of one deployment; `None` for values that no engine reports now."""
    engines = load.engines
    known = engines.truth == "value" and engines.num_reporting > 0
    slots = engines.max_num_seqs * engines.num_reporting
    shares = [engines.kv_cache_usage, *([engines.num_requests / slots] if slots else [])]
    return {
        "requests_per_s": round(load.arrivals.requests_per_s, 3),
        "queued": load.queue.num_requests,
        "ready": load.pods.ready,
        "running": engines.num_requests_running if known else None,
        "waiting": engines.num_requests_waiting if known else None,
        "kv": round(engines.kv_cache_usage, 4) if known else None,
        "headroom": round(max(0.0, 1 - max(shares)), 4) if known else None,
    }

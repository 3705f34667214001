"""The circuit breaker of Redis: it opens after a few failures in a row, and a probe in the background closes it.

While it is open, requests do not call Redis.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("pagemill.gateway.limits")

MAX_FAILURES = 3


class Breaker:
    def __init__(self) -> None:
        self.closed = False
        """Whether requests may call Redis. At the start only a probe may, because Redis may be unavailable."""
        self.num_openings = 0
        self._num_failures = 0
        self._announced: bool | None = None

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, why: str, *, certain: bool) -> None:
        """Count a failure. `certain`: there is no server, so the breaker opens at the first failure."""
        self._num_failures += 1
        if (certain or self._num_failures >= MAX_FAILURES) and self.closed:
            self.closed = False
            self.num_openings += 1
        if not self.closed and self._announced is not False:
            self._announced = False
            logger.warning("Redis cannot be used (%s); this gateway goes on with its own share of every limit", why)

    def probed(self) -> bool:
        """Note a successful probe. Return whether it closed the breaker."""
        self._num_failures = 0
        if self.closed:
            return False
        self.closed = True
        self._announced = True
        logger.info("Redis answers; limits are shared with the other gateways")
        return True

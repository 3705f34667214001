"""Whether Redis may be asked: open after a few failures in a row, closed again by a probe that no request waits for.

While it is open no request spends a moment on Redis.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("pagemill.gateway.limits")

MAX_FAILURES = 3


class Breaker:
    def __init__(self) -> None:
        self.closed = False
        """Requests may ask. At the start only a probe may: it is not known yet whether Redis is there."""
        self.num_openings = 0
        self._num_failures = 0
        self._announced: bool | None = None

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, why: str, *, certain: bool) -> None:
        """`certain`: no server is there; no more failures are needed to know."""
        self._num_failures += 1
        if (certain or self._num_failures >= MAX_FAILURES) and self.closed:
            self.closed = False
            self.num_openings += 1
        if not self.closed and self._announced is not False:
            self._announced = False
            logger.warning("Redis cannot be used (%s); this gateway goes on with its own share of every limit", why)

    def probed(self) -> bool:
        """The probe came through; whether that closed the breaker."""
        self._num_failures = 0
        if self.closed:
            return False
        self.closed = True
        self._announced = True
        logger.info("Redis answers; limits are shared with the other gateways")
        return True

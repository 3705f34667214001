"""Where the server stands between start and end, with the reason for every wait. Asked by the health routes.

Written by `main` (phases of its own) and by the engine client (what the engine process reports); decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Observer = Callable[[str, str], None]
"""Called with (phase, detail) on every change."""


class Lifecycle:
    """One server's phase. From `ready` it may go to sleep and come back.

    After `draining`, `failed` or `stopped` there is no way back.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.phase = "starting"
        self.detail = "reading settings"
        self._observer = observer
        self._started_s = time.monotonic()
        self._since_s = self._started_s
        self._takes_requests = False

    @property
    def takes_requests(self) -> bool:
        """Ready, or draining while some gateway may not know yet."""
        return self._takes_requests

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    @property
    def ending(self) -> bool:
        return self.phase in ("draining", "failed", "stopped")

    def enter(self, phase: str, detail: str = "") -> None:
        """Move on, unless the server is already ending and `phase` is no further end."""
        if self.ending and phase not in ("failed", "stopped"):
            return
        if (phase, detail) == (self.phase, self.detail):
            return
        if phase != self.phase:
            self._since_s = time.monotonic()
        self.phase = phase
        self.detail = detail
        if phase != "draining":
            self._takes_requests = phase == "ready"
        if self._observer is not None:
            self._observer(phase, detail)

    def close_door(self) -> None:
        """Refuse every further request, now that the server drains."""
        self._takes_requests = False

    def report(self) -> dict[str, Any]:
        """The body of `/readyz`. Times in seconds: in this phase, and since start."""
        now_s = time.monotonic()
        return {
            "ready": self.ready,
            "phase": self.phase,
            "detail": self.detail,
            "phase_s": round(now_s - self._since_s, 3),
            "elapsed_s": round(now_s - self._started_s, 3),
        }

"""The phase of the server between start and end, with the reason for every wait; the health routes read it.

`main` and the engine client (with the engine process's reports) set it. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Observer = Callable[[str, str], None]
"""Called with (phase, detail) on every change."""


class Lifecycle:
    """One server's phase. From `ready` it may go to sleep and return.

    `draining`, `failed` and `stopped` are final.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.phase = "starting"
        self.detail = "reading settings"
        self._observer = observer
        self._started_s = time.monotonic()
        self._since_s = self._started_s
        self._accepts_requests = False

    @property
    def accepts_requests(self) -> bool:
        """Whether requests are accepted: ready, or draining while some gateway may not know yet."""
        return self._accepts_requests

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    @property
    def ending(self) -> bool:
        return self.phase in ("draining", "failed", "stopped")

    def enter(self, phase: str, detail: str = "") -> None:
        """Enter a phase. While the server is ending, only `failed` and `stopped` have an effect."""
        if self.ending and phase not in ("failed", "stopped"):
            return
        if (phase, detail) == (self.phase, self.detail):
            return
        if phase != self.phase:
            self._since_s = time.monotonic()
        self.phase = phase
        self.detail = detail
        if phase != "draining":
            self._accepts_requests = phase == "ready"
        if self._observer is not None:
            self._observer(phase, detail)

    def refuse_requests(self) -> None:
        """Refuse all further requests of a draining server."""
        self._accepts_requests = False

    def report(self) -> dict[str, Any]:
        """Return the body of `/readyz`. Times are in seconds: in this phase, and since the start."""
        now_s = time.monotonic()
        return {
            "ready": self.ready,
            "phase": self.phase,
            "detail": self.detail,
            "phase_s": round(now_s - self._since_s, 3),
            "elapsed_s": round(now_s - self._started_s, 3),
        }

"""How long one request goes on waiting for an engine while its deployment has none."""

from __future__ import annotations


class Outage:
    def __init__(self) -> None:
        self._until: float | None = None

    def is_over(self, now: float, left_s: float) -> bool:
        """Whether it has waited enough; `left_s`, as it was when the outage was first seen, is how long that is."""
        if self._until is None:
            self._until = now + left_s
        return now >= self._until

    def ended(self) -> None:
        """There is an engine again; the next outage is another one."""
        self._until = None

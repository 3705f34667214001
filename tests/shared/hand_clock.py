"""A clock that changes only when a test sets it."""

from __future__ import annotations


class Clock:
    """A function like `time.monotonic`; `now` is its value in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

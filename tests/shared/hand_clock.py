"""A clock that stands until a test moves it."""

from __future__ import annotations


class Clock:
    """Called like `time.monotonic`; `now` is its reading in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

"""Replaces the capturer of CUDA graphs where there is no device."""

from __future__ import annotations

from collections.abc import Callable


class ReplayRecorder:
    """Replaces CUDA graphs if there is no device: a captured function runs again on the same buffers."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_run = 0
        self.errors: list[Exception] = []
        """The errors that the next replays raise."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def again() -> None:
            self.num_run += 1
            if self.errors:
                raise self.errors.pop()
            run()

        return again

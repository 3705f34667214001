"""Sleep interface of a runner: frees its device's memory and allocates it again."""

from __future__ import annotations

from typing import Protocol


class SleepError(RuntimeError):
    """The runner cannot sleep; the message names the remedy."""


class Sleeps(Protocol):
    """Sleep methods of a runner. Call them only with no step in flight."""

    def sleep(self) -> int:
        """Free the KV cache and move weights to the host. Returns the number of freed bytes of the device.

        Raises `SleepError` if the host's memory is too small; nothing has changed then.
        """

    def wake(self) -> None:
        """Make the runner ready for steps, with an empty KV cache. Raises what allocating raises."""

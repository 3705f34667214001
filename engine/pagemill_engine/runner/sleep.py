"""What a runner can do between steps when it is not needed: give its device's memory back, and take it again."""

from __future__ import annotations

from typing import Protocol


class SleepError(RuntimeError):
    """It cannot sleep; the message names the remedy."""


class Sleeps(Protocol):
    """Only with no step in flight."""

    def sleep(self) -> int:
        """The KV cache is gone, weights wait in the host's memory. Returns how many bytes of the device are free now.

        Raises `SleepError` when the host has no room: then all is as before.
        """

    def wake(self) -> None:
        """Be able to run steps again; the KV cache is empty. Raises what allocating raises."""

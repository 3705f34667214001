"""Whether a request may be what brings engines down, judged by how its engines ended. Pure; one per request.

What can be told apart: an engine whose own work failed says so before it goes (`crashed`); one that was killed, or lost
its node, is simply gone (`lost`), and that says nothing of its requests, unless it happens to the same request again
and again before a single token came.
"""

from __future__ import annotations

from pagemill_gateway.brain.interface import FailureKind

MOST_CRASHES = 2
MOST_LOSSES = 3
"""In a row without a token; the last of them alone on its engine."""


class Suspicion:
    def __init__(self) -> None:
        self._num_crashes = 0
        self._num_losses = 0

    def failed(self, kind: FailureKind, *, progressed: bool) -> None:
        """One try ended; `progressed`: it brought tokens."""
        if kind == "crashed":
            self._num_crashes += 1
        if progressed:
            self._num_losses = 0
        elif kind == "lost":
            self._num_losses += 1

    @property
    def must_be_alone(self) -> bool:
        return self._num_crashes > 0 or self._num_losses >= MOST_LOSSES - 1

    @property
    def convicted(self) -> bool:
        """It had its try alone, and that engine ended as well."""
        return self._num_crashes >= MOST_CRASHES or self._num_losses >= MOST_LOSSES

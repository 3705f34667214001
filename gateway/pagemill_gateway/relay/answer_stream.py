"""The stream of an engine's answer as the relay reads it. `engine_link` implements it.

It returns complete frames of a valid answer, or raises `UpstreamFailure`. Frames that arrive while a reader waits are
passed to its `take` first, so that a plain stream wakes its task only for the first and the last frames.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pagemill_protocol.frames import FrameError
from pagemill_protocol.request.generate import FrameMeta
from pagemill_routing.brain.interface import Liveness

SILENCE_CHECKS = 4
"""The number of checks per silence timeout, of which all must find the engine silent. A pause of this process itself
counts as one check."""

Frame = tuple[FrameMeta, bytes]
Take = Callable[[list[Frame]], bool]
"""Forwards frames at once and returns true, or returns false, so that the reader gets them. The reader also gets its
exceptions."""
AskLiveness = Callable[[], Awaitable[Liveness]]
"""Returns the liveness of an engine that is silent in an answer."""


class AnswerStream(Protocol):
    """The frames of one answer, in groups as the network delivers them."""

    weights_digest: str
    """The digest of the engine's weights; empty if the engine does not report it."""
    waited_s: float
    """The time that `read` has waited for the engine."""

    async def read(self, take: Take | None = None) -> list[Frame]:
        """Return the next frames that `take` refuses, at least one, or an empty list after the last one.

        Raises `UpstreamFailure`, `PagemillError` for a request that no engine would accept, and what `take` raises.
        """
        ...

    def raise_allowance(self, tokens: int) -> bool:
        """Raise the token allowance of the request at its engine. Return whether that was sent."""
        ...

    def close(self) -> None:
        """End reading. Before the last frame, this aborts the request in the engine."""
        ...


def check_order(frames: list[Frame], is_complete: bool) -> bool:
    """Return whether the answer is complete after these frames. Raises `FrameError` if one follows the last frame."""
    for meta, _ in frames:
        if is_complete:
            raise FrameError("a frame follows the last one")
        is_complete = meta.last
    return is_complete

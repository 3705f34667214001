"""How fast a queue empties, learned while somebody waits: what `Retry-After` and the chances of a deadline come from.

Tokens served per second of waiting, both fading with a half-life, so that a deployment that grew or shrank is known
after a while. Pure: time comes in.
"""

from __future__ import annotations

HALF_LIFE_S = 20.0
LEAST_SECONDS = 0.5
"""Of waiting, before the rate means anything."""
UNKNOWN_WAIT_S = 5.0
MAX_WAIT_S = 120.0


class DrainRate:
    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """Up to when waiting is counted; `None` while nobody waits."""

    def watch(self, now: float, waiting: bool) -> None:
        """Count the time since the call before, if somebody waited then; `waiting`: whether somebody does now."""
        if self._since is not None and now > self._since:
            elapsed_s = now - self._since
            fading = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._tokens *= fading
            self._seconds = self._seconds * fading + elapsed_s
        self._since = now if waiting else None

    def served(self, cost_tokens: int) -> None:
        """One that waited got its turn."""
        self._tokens += cost_tokens

    @property
    def tokens_per_s(self) -> float | None:
        if self._seconds < LEAST_SECONDS or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def wait_s(self, num_tokens: int) -> float | None:
        """Until so many tokens are served; `None` while nothing is learned."""
        rate = self.tokens_per_s
        return num_tokens / rate if rate is not None else None

    def retry_after_s(self, num_tokens: int, start_s: float | None = None) -> float:
        """When it is worth coming back to a queue of so many tokens, whose engine is to start first in `start_s`."""
        wait_s = self.wait_s(num_tokens)
        if wait_s is None and start_s is None:
            return UNKNOWN_WAIT_S
        return min(MAX_WAIT_S, max(1.0, (wait_s or 0.0) + (start_s or 0.0)))

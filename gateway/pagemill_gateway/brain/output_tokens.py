"""How long the answers of a deployment are: a running mean, so that routing can guess when a seat becomes free."""

from __future__ import annotations

PRIOR_TOKENS = 128.0
WEIGHT = 0.02
"""Of the newest answer: a memory of about 50."""


class OutputTokens:
    def __init__(self) -> None:
        self.mean = PRIOR_TOKENS

    def finished(self, num_tokens: int) -> None:
        self.mean += WEIGHT * (num_tokens - self.mean)

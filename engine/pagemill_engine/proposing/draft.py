"""Proposes what a draft model drafted behind the last step, and decides how many tokens it drafts behind the next.

The runner drafts for all sampling requests at once, a token of each in every round, so a round costs the same however
many go on. A step whose tokens are drafted for is read before the next is planned: what was drafted is known then.
`pagemill_execution.runners.drafter` runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_engine.proposing.acceptance import Acceptance
from pagemill_engine.proposing.base import KnownTokens
from pagemill_engine.proposing.gain import LEAST_GAIN, MsOf, StepShape

ROUND_GAIN = 0.2
"""Weight of the latest measurement of a round."""
RETRY_STEPS = 64
"""Steps without drafts after which a few are drafted to learn whether they are right by now."""
RETRY_TOKENS = 2


class DraftProposer:
    """`base.Proposer` of one sequence."""

    agreement = 0

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._drafted: list[int] = []
        self._start = 0

    def take(self, drafted: list[int]) -> None:
        """Note what was drafted behind the tokens that are known now."""
        self._drafted, self._start = drafted, len(self._token_ids)

    def propose(self, most: int) -> list[int]:
        num_since = len(self._token_ids) - self._start
        if self._drafted[:num_since] != self._token_ids[self._start :]:
            return []
        return self._drafted[num_since : num_since + most]


class DraftMethod:
    """`base.Method`."""

    def begin(self, sequence: KnownTokens) -> DraftProposer:
        return DraftProposer(sequence.token_ids)

    def end(self, sequence: KnownTokens) -> None:
        pass


class Rounds:
    """How many tokens are drafted for each request behind a step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._round_ms: float | None = None
        self._num_without = 0

    def record(self, num_rounds: int, ms: float) -> None:
        """Record that so many rounds took `ms`."""
        if num_rounds:
            each = ms / num_rounds
            before = each if self._round_ms is None else self._round_ms
            self._round_ms = before + ROUND_GAIN * (each - before)

    def choose(self, acceptances: Sequence[Acceptance], step: StepShape, ms_of: MsOf | None, turn_ms: float) -> int:
        """Return the rounds behind a step of which most tokens are expected in a millisecond.

        `acceptances`: of the requests that could verify what is drafted.
        """
        if ms_of is None:
            return self._most
        base_ms = ms_of(step.num_tokens, step.num_context_tokens)
        if base_ms <= 0:  # nothing is known about the device
            return 0
        chances = [acceptance.along(0, self._most) for acceptance in acceptances]
        tokens = float(max(step.num_sampling, len(acceptances)))
        best, best_num = LEAST_GAIN * tokens / base_ms, 0
        for num in range(1, self._most + 1):
            tokens += sum(each[num - 1] for each in chances)
            verify_ms = ms_of(step.num_tokens + num * len(acceptances), step.num_context_tokens)
            rate = tokens / (turn_ms + verify_ms + num * (self._round_ms or 0.0))
            if rate > best:
                best, best_num = rate, num
        self._num_without = 0 if best_num else self._num_without + 1
        if self._num_without < RETRY_STEPS:
            return best_num
        self._num_without = 0
        return min(RETRY_TOKENS, self._most)

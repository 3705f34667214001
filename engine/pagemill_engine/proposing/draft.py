"""Proposes what a draft model drafted behind the last step, and decides how many tokens it drafts behind the next.

The runner drafts for all sampling requests at once, a token of each in every round, so a round costs the same however
many go on. A step whose tokens are drafted for is read before the next is planned: what was drafted is known then.
`pagemill_execution.runners.drafter` runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pagemill_engine.proposing.acceptance import Acceptance
from pagemill_engine.proposing.base import KnownTokens
from pagemill_engine.proposing.gain import BEST_CHANCE, LEAST_GAIN, MsOf, StepShape

ROUND_GAIN = 0.2
"""Weight of the latest measurement of a round."""
FIRST_TRIES, TRIES = 2.0, 0.01
"""Time that drafting more than seems worth it may be expected to lose, to learn whether it is: so many steps at first,
and this share of all later ones."""


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
        self._tries_ms: float | None = None
        """What is left of the time for tries; None before the first choice."""

    def record(self, num_rounds: int, ms: float) -> None:
        """Record that so many rounds took `ms`."""
        if num_rounds:
            each = ms / num_rounds
            before = each if self._round_ms is None else self._round_ms
            self._round_ms = before + ROUND_GAIN * (each - before)

    def choose(self, acceptances: Sequence[Acceptance], step: StepShape, ms_of: MsOf | None, turn_ms: float) -> int:
        """Return the rounds behind a step of which most tokens are expected in a millisecond, or at times more: the
        fewest that would be better if their tokens were nearly sure.

        `acceptances`: of the requests that could verify what is drafted.
        """
        if ms_of is None:
            return self._most
        base_ms = ms_of(step.num_tokens, step.num_context_tokens)
        if base_ms <= 0:  # nothing is known about the device
            return 0
        along = sorted((each.along(0, self._most) for each in acceptances), key=lambda each: -each[-1])
        parts = [len(along)]  # the step may verify the likeliest rows only
        while parts[-1] > 1:
            parts.append((parts[-1] + 1) // 2)
        plain = hoped = float(max(step.num_sampling, len(along)))
        expected, hopes = [(plain, base_ms)], [0.0]
        for num in range(1, self._most + 1):
            totals = [*accumulate((sum(each[:num]) for each in along), initial=plain)]
            others_ms = turn_ms + num * (self._round_ms or 0.0)
            step_ms = {part: others_ms + ms_of(step.num_tokens + num * part, step.num_context_tokens) for part in parts}
            part = max(parts, key=lambda part: totals[part] / step_ms[part])
            expected.append((totals[part], step_ms[part]))
            hoped += len(along) * BEST_CHANCE**num
            hopes.append(hoped / step_ms[len(along)])
        rates = [tokens / ms for tokens, ms in expected]
        rates[0] *= LEAST_GAIN
        best_num = rates.index(max(rates))
        tried = next((num for num in range(best_num + 1, self._most + 1) if hopes[num] > rates[best_num]), None)
        if tried is None:
            return best_num
        self._tries_ms = FIRST_TRIES * base_ms if self._tries_ms is None else self._tries_ms
        self._tries_ms += TRIES * expected[best_num][1]
        tokens, ms = expected[tried]
        lost_ms = ms - tokens / rates[best_num]
        if lost_ms > self._tries_ms:
            return best_num
        self._tries_ms -= lost_ms
        return tried

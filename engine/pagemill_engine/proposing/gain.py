"""Chooses how many tokens are proposed for each row of a step: as many as give the most tokens in a millisecond.

The time is that of the whole step: a token more for one row makes all others wait. Step times have knees, since kernels
compute up to 4, 8 and 16 rows at different speeds, so more proposals can be worth it where a few are not: all numbers
are compared, the likeliest tokens of all rows first. Chances are `acceptance`'s part, step times the step-time model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_GAIN = 1.02
"""A step with proposals must be expected to be better by this factor: chances and times are estimates."""
MOST_DEVIATION = 2.5
"""Factor between a measured and a predicted time beyond which the machine did something else."""
USUAL_GAIN, PROPOSING_GAIN = 0.1, 0.25
"""Weights of the latest step without and with proposed tokens."""
FORGETTING = 0.0005
"""Share of what was measured that is forgotten with each step without proposed tokens."""
BEST_CHANCE = 0.97
"""Chance of a token in a text that is copied."""


class StepShape(NamedTuple):
    """A step without proposals."""

    num_tokens: int
    num_sampling: int
    """Requests that sample in it."""
    num_context_tokens: int = 0


MsOf = Callable[[int, int], float]
"""Predicts the milliseconds of a step with so many tokens, whose decodes read so many tokens of context."""


class MeasuredSteps:
    """How much longer steps with proposed tokens take than was predicted, where steps without take what was predicted.

    Kernels have knees that the step-time model learns slowly, as few steps have just so many tokens: 9 rows can take
    half as long again as 8. Sizes between two powers of two share what was measured. It is forgotten slowly, so that
    something is tried again.
    """

    def __init__(self) -> None:
        self._usual = 1.0
        """Measured time of steps without proposed tokens, as a multiple of the predicted one."""
        self._factors: dict[int, float] = {}

    def record(self, num_tokens: int, predicted_ms: float, ms: float, *, proposed: bool) -> None:
        if not (predicted_ms > 0 and ms > 0):
            return
        ratio = min(MOST_DEVIATION, max(1 / MOST_DEVIATION, ms / predicted_ms))
        if not proposed:
            self._usual += USUAL_GAIN * (ratio - self._usual)
            for size, factor in self._factors.items():
                self._factors[size] = factor + FORGETTING * (1.0 - factor)
            return
        size, now = (num_tokens - 1).bit_length(), ratio / self._usual
        before = self._factors.get(size, 1.0)
        self._factors[size] = before + PROPOSING_GAIN * (min(MOST_DEVIATION, now) - before)

    def factor(self, num_tokens: int) -> float:
        """Return what a prediction for a step of so many tokens, with proposed ones, is multiplied by."""
        return self._factors.get((num_tokens - 1).bit_length(), 1.0)


def choose(
    chances: Sequence[Sequence[float]],
    step: StepShape,
    ms_of: MsOf,
    turn_ms: float = 0.0,
    factor: Callable[[int], float] = lambda _: 1.0,
    most: int | None = None,
) -> list[int]:
    """Return the number of tokens to propose for each row. All are 0 if nothing is gained.

    `chances`: for each row and proposed token, the chance that it and all before it are sampled. `turn_ms`: time that
    a step takes longer because it waits for the tokens of the one before, which one without proposals does not.
    `factor`: what predictions for steps of so many tokens, with proposed ones, are multiplied by. `most`: of all rows.
    """
    numbers = [0] * len(chances)
    ordered = [(-chance, place, row) for row, each in enumerate(chances) for place, chance in enumerate(each)]
    ordered.sort()
    base_ms = ms_of(step.num_tokens, step.num_context_tokens)
    if base_ms <= 0:  # nothing is known about the device
        return numbers
    tokens, best_num = float(step.num_sampling), 0
    best = LEAST_GAIN * tokens / base_ms
    for num, (chance, _, _) in enumerate(ordered[:most], 1):
        tokens -= chance
        size = step.num_tokens + num
        rate = tokens / (turn_ms + ms_of(size, step.num_context_tokens) * factor(size))
        if rate > best:
            best, best_num = rate, num
    for _, _, row in ordered[:best_num]:
        numbers[row] += 1
    return numbers


def most_of_same_rounding(step: StepShape, rounding_rows: Sequence[int]) -> int | None:
    """Return how many tokens a step may have more without its products being rounded otherwise; None: any number.
    `rounding_rows`: as in `RunnerInfo`."""
    limits = [rows - 1 - num for num in (step.num_tokens, step.num_sampling) for rows in rounding_rows if rows > num]
    return min(limits, default=None)


def can_gain(num_rows: int, most: int, step: StepShape, ms_of: MsOf) -> bool:
    """Whether a step could be better with proposals that are nearly always right: not where it is bound by
    computation. Takes a few predictions, so that rows of a large batch need not be asked."""
    base_ms = ms_of(step.num_tokens, step.num_context_tokens)
    tokens, chance, num = float(step.num_sampling), 1.0, step.num_tokens
    for _ in range(most):
        chance *= BEST_CHANCE
        for part in (1, num_rows - 1):  # one row alone, then all of them
            tokens += chance * part
            num += part
            ms = ms_of(num, step.num_context_tokens)
            if base_ms > 0 and tokens * base_ms > LEAST_GAIN * step.num_sampling * ms:
                return True
    return False

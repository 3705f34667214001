"""How long an answer is expected to be before it begins: a high quantile of the caller's recent ones from the model.

A reservation of `max_tokens` would hold a budget for text that is hardly ever written. What is expected is only the
first part that is reserved (`allowance`); it has a floor, so that a caller with short answers is not admitted with a
few tokens each and cut short then.
"""

from __future__ import annotations

from collections import OrderedDict, deque

LEAST_TOKENS = 256
"""Also while fewer than `MIN_SAMPLES` answers of a caller from a model were seen."""
MIN_SAMPLES = 8
NUM_SAMPLES = 64
QUANTILE = 0.9
MAX_TRACKED = 4096
"""Pairs of caller and model; the one that is longest unused is forgotten first."""


class AnswerLengths:
    """Recent lengths by caller and model."""

    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()
        self._guesses: dict[tuple[str, str], int] = {}

    def expected(self, account: str, model: str) -> int:
        """Tokens of one sequence."""
        return max(LEAST_TOKENS, self._guesses.get((account, model), 0))

    def observe(self, account: str, model: str, num_tokens: int) -> None:
        whose = (account, model)
        samples = self._samples.setdefault(whose, deque(maxlen=NUM_SAMPLES))
        self._samples.move_to_end(whose)
        samples.append(num_tokens)
        if len(samples) >= MIN_SAMPLES:
            self._guesses[whose] = sorted(samples)[int(QUANTILE * (len(samples) - 1) + 0.5)]
        if len(self._samples) > MAX_TRACKED:
            forgotten, _ = self._samples.popitem(last=False)
            self._guesses.pop(forgotten, None)

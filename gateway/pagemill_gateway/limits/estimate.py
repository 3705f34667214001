"""How long an answer will be, guessed before it begins: a high quantile of the model's recent ones.

A reservation of `max_tokens` would hold a budget for text that is hardly ever written; one of nothing would let
everybody in at once. What was guessed wrong is put right when the answer ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque

DEFAULT_TOKENS = 256
"""While fewer than `MIN_SAMPLES` answers of a caller from a model were seen."""
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

    def estimate(self, account: str, model: str, max_tokens: int | None) -> int:
        """Tokens of one choice, at least 1."""
        guess = self._guesses.get((account, model), DEFAULT_TOKENS)
        return guess if max_tokens is None else max(1, min(guess, max_tokens))

    def observe(self, account: str, model: str, num_tokens: int) -> None:
        whose = (account, model)
        samples = self._samples.setdefault(whose, deque(maxlen=NUM_SAMPLES))
        self._samples.move_to_end(whose)
        samples.append(num_tokens)
        if len(samples) >= MIN_SAMPLES:
            self._guesses[whose] = max(1, sorted(samples)[int(QUANTILE * (len(samples) - 1) + 0.5)])
        if len(self._samples) > MAX_TRACKED:
            forgotten, _ = self._samples.popitem(last=False)
            self._guesses.pop(forgotten, None)

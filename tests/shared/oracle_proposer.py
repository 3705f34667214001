"""A proposer that knows the answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from pagemill_engine.proposing.base import KnownTokens, Proposer


class Oracle:
    """Proposes the true continuation, found among `texts` (prompts with answers), with errors at random places."""

    def __init__(
        self, token_ids: list[int], texts: list[list[int]], draw: random.Random, error_rate: float, vocab_size: int
    ) -> None:
        self.agreement = 0
        self.token_ids, self.texts = token_ids, texts
        self.draw, self.error_rate, self.vocab_size = draw, error_rate, vocab_size

    def propose(self, most: int) -> list[int]:
        known = len(self.token_ids)
        fitting = [text for text in self.texts if text[:known] == self.token_ids and len(text) > known]
        if not fitting:
            return []
        tokens = self.draw.choice(fitting)[known : known + self.draw.randint(1, most)]
        return [(each + 1) % self.vocab_size if self.draw.random() < self.error_rate else each for each in tokens]


class Made:
    """`base.Method` of proposers that are made by a function of a sequence's tokens."""

    def __init__(self, make: Callable[[list[int]], Proposer]) -> None:
        self.make = make

    def begin(self, sequence: KnownTokens) -> Proposer:
        return self.make(sequence.token_ids)

    def end(self, sequence: KnownTokens) -> None:
        pass


def oracle(texts: list[list[int]], draw: random.Random, error_rate: float, vocab_size: int) -> Made:
    return Made(lambda token_ids: Oracle(token_ids, texts, draw, error_rate, vocab_size))

"""Proposes what followed the last tokens when they stood earlier in the prompt or the output.

Answers that quote, edit or list repeat what is there. Source: prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from pagemill_engine.proposing.base import KnownTokens
from pagemill_engine.proposing.token_history import TokenHistory


class NgramProposer:
    """`base.Proposer` of one sequence."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._history = TokenHistory()
        self.agreement = 0

    def propose(self, most: int) -> list[int]:
        self._history.extend(self._token_ids)
        match = self._history.find(self._token_ids, self._token_ids)
        if match is None:
            return []
        self.agreement = match.length
        return continuation(self._token_ids, match.end, most)


class Ngrams:
    """`base.Method`."""

    def begin(self, sequence: KnownTokens) -> NgramProposer:
        return NgramProposer(sequence.token_ids)

    def end(self, sequence: KnownTokens) -> None:
        pass


def continuation(token_ids: list[int], start: int, most: int) -> list[int]:
    """Return `most` tokens from `start` on. What would follow the last token is repeated from `start`."""
    end = len(token_ids)
    if start + most <= end:
        return token_ids[start : start + most]
    return [token_ids[start + index % (end - start)] for index in range(most)]

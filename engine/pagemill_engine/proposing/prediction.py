"""Proposes what the client predicts: a text that the answer probably repeats, such as a file before an edit.

The prediction is followed from its beginning, and after a difference from where the last tokens stand in it.
"""

from __future__ import annotations

from pagemill_engine.proposing.base import KnownTokens
from pagemill_engine.proposing.ngram import continuation
from pagemill_engine.proposing.token_history import TokenHistory

FIRST_AGREEMENT = 9
"""What the client's word counts for, as tokens of agreement, before any token is there."""
_END = -1
"""Separates the prediction from the answer."""


class PredictionProposer:
    """`base.Proposer` of one sequence."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, predicted: list[int]) -> None:
        self.agreement = 0
        self._token_ids = token_ids
        self._num_read = num_prompt_tokens
        self._num_predicted = len(predicted)
        self._text = [*predicted, _END]
        """The prediction, and the answer so far."""
        self._history = TokenHistory()
        self._num_equal = 0
        """Tokens of the answer that are those at the beginning of the prediction."""

    def propose(self, most: int) -> list[int]:
        added = self._token_ids[self._num_read :]
        num_answered = len(self._text) - self._num_predicted - 1
        for token_id in added:
            if self._num_equal == num_answered < self._num_predicted and self._text[num_answered] == token_id:
                self._num_equal += 1
            num_answered += 1
        self._text += added
        self._num_read += len(added)
        self._history.extend(self._text)
        if self._num_equal == num_answered:
            self.agreement, start = FIRST_AGREEMENT + num_answered, num_answered
        else:
            match = self._history.find(self._text, self._text)
            if match is None:
                return []
            self.agreement, start = match.length, match.end
        if start > self._num_predicted:
            return continuation(self._text, start, most)
        return self._text[start : min(start + most, self._num_predicted)]


class PredictionMethod:
    """`base.Method`."""

    def begin(self, sequence: KnownTokens) -> PredictionProposer | None:
        predicted = sequence.predicted_token_ids
        return PredictionProposer(sequence.token_ids, sequence.num_prompt_tokens, predicted) if predicted else None

    def end(self, sequence: KnownTokens) -> None:
        pass

"""Proposes what followed the last tokens in recent answers to prompts with the same beginning.

Agents and editors ask for the same file or the same call again, in another conversation or once more. An answer is kept
with the end of its prompt, so that an answer to the same question is followed from its first token. Answers are shared
by requests that also share cached prompts: those with the same root of block hashes, which is another one for another
tenant or adapter, and with the same first tokens. All answers together take at most some megabytes (`MOST_TOKENS`); the
beginnings that were unused for longest are dropped first, and of one beginning its oldest answers.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from pagemill_engine.proposing.base import KnownTokens
from pagemill_engine.proposing.token_history import TokenHistory

MOST_TOKENS = 131_072
"""Tokens of all answers that are kept, at 16 bytes each."""
MOST_OF_ONE = 16_384
"""Tokens of the answers to prompts with one beginning."""
FIRST_TOKENS = 16
"""Tokens that a beginning has: those of a block of the prefix cache."""
PROMPT_TOKENS = 32
"""Tokens of a prompt that are kept before its answer."""
_END = -1
"""Behind each answer."""


class _Answers:
    def __init__(self, tokens: array[int]) -> None:
        self.tokens, self.history = tokens, TokenHistory()
        self.history.extend(tokens)


class RecentAnswers:
    """`base.Method`."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, _Answers] = OrderedDict()
        self._num_tokens = 0

    def begin(self, sequence: KnownTokens) -> RecentAnswerProposer:
        beginning = _beginning(sequence)
        if beginning in self._answers:
            self._answers.move_to_end(beginning)
        return RecentAnswerProposer(sequence.token_ids, self._answers, beginning)

    def end(self, sequence: KnownTokens) -> None:
        start = max(0, sequence.num_prompt_tokens - PROMPT_TOKENS)
        added = array("i", [*sequence.token_ids[start:][: MOST_OF_ONE - 1], _END])
        if len(added) <= sequence.num_prompt_tokens - start + 1:
            return
        beginning = _beginning(sequence)
        before = self._answers.pop(beginning, None)
        tokens = added
        if before is not None:
            self._num_tokens -= len(before.tokens)
            if len(before.tokens) + len(added) <= MOST_OF_ONE:
                before.tokens += added
                before.history.extend(before.tokens)
                self._keep(beginning, before)
                return
            tokens = before.tokens[len(added) - MOST_OF_ONE // 2 :] + added if len(added) < MOST_OF_ONE // 2 else added
        self._keep(beginning, _Answers(tokens))

    def _keep(self, beginning: bytes, answers: _Answers) -> None:
        self._answers[beginning] = answers
        self._num_tokens += len(answers.tokens)
        while self._num_tokens > MOST_TOKENS:
            _, dropped = self._answers.popitem(last=False)
            self._num_tokens -= len(dropped.tokens)


class RecentAnswerProposer:
    """`base.Proposer` of one sequence."""

    def __init__(self, token_ids: list[int], answers: OrderedDict[bytes, _Answers], beginning: bytes) -> None:
        self._token_ids, self._answers, self._beginning = token_ids, answers, beginning
        self.agreement = 0

    def propose(self, most: int) -> list[int]:
        answers = self._answers.get(self._beginning)
        if answers is None or (match := answers.history.find(answers.tokens, self._token_ids)) is None:
            return []
        self.agreement = match.length
        tokens = answers.tokens[match.end : match.end + most].tolist()
        return tokens[: tokens.index(_END)] if _END in tokens else tokens


def _beginning(sequence: KnownTokens) -> bytes:
    """Return a key, as bytes, which remember their hash: one is looked up for each row of each step."""
    first = min(FIRST_TOKENS, sequence.num_prompt_tokens)
    return array("i", sequence.token_ids[:first]).tobytes() + sequence.cache_root

"""Prompts as token ids, and the order of a session's turns.

Prompts share what the workload defines: the turns of a session begin with the conversation so far, and requests may
have tokens of their own. Other prompts have no prefix in common.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from pagemill_simulator.workloads.request import SimRequest

FILLER = 7
"""The token of everything that need not be distinguished."""


def fresh_prompt(index: int, length: int, vocab_size: int) -> list[int]:
    """Return a prompt whose beginning is unique: it contains the request's number."""
    beginning = [index % vocab_size, index // vocab_size % vocab_size][:length]
    return beginning + [FILLER] * (length - len(beginning))


class Conversations:
    def __init__(self, requests: Sequence[SimRequest], vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self._num_to_come = Counter(each.session for each in requests if each.session is not None)
        self._said: dict[int, list[int]] = {}
        """The latest prompt with its answer, by session."""
        self._busy: dict[int, deque[int]] = {}
        """Waiting turns by session with an unanswered turn."""

    def arrives(self, index: int) -> bool:
        """Return whether the turn may be sent now; otherwise `ended` returns it later."""
        session = self._requests[index].session
        if session is None:
            return True
        if session in self._busy:
            self._busy[session].append(index)
            return False
        self._busy[session] = deque()
        return True

    def prompt(self, index: int) -> list[int]:
        request = self._requests[index]
        length = max(1, request.num_prompt_tokens)
        said = self._said.get(request.session, []) if request.session is not None else []
        if not said and not request.token_ids:
            return fresh_prompt(index, length, self._vocab_size)
        repeated = said[: max(0, length - len(request.token_ids))]
        return repeated + [FILLER] * (length - len(repeated) - len(request.token_ids)) + list(request.token_ids)

    def ended(self, index: int, prompt: list[int], answer: list[int]) -> int | None:
        """Record an answer; return the turn that waited for it, or None."""
        session = self._requests[index].session
        if session is None:
            return None
        self._num_to_come[session] -= 1
        if not self._num_to_come[session]:
            self._said.pop(session, None)
            del self._busy[session]
            return None
        self._said[session] = prompt + answer
        if self._busy[session]:
            return self._busy[session].popleft()
        del self._busy[session]
        return None

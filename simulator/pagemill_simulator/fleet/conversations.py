"""Prompts as token ids, and which turn of a session may be sent.

Prompts share what a workload says that they share: the turns of a session begin with what was said before, and no two
others have a prefix in common.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from pagemill_simulator.workloads.request import SimRequest

FILLER = 7
"""Token of all that is not distinguished."""


def fresh_prompt(index: int, length: int, vocab_size: int) -> list[int]:
    """That begins as no other: its number distinguishes it."""
    beginning = [index % vocab_size, index // vocab_size % vocab_size][:length]
    return beginning + [FILLER] * (length - len(beginning))


class Conversations:
    def __init__(self, requests: Sequence[SimRequest], vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self._num_to_come = Counter(each.session for each in requests if each.session is not None)
        self._said: dict[int, list[int]] = {}
        """By session: the latest prompt with its answer."""
        self._busy: dict[int, deque[int]] = {}
        """By session that waits for an answer: turns that wait for it."""

    def arrives(self, index: int) -> bool:
        """Whether it may be sent now; else `ended` names it in time."""
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
        if not said:
            return fresh_prompt(index, length, self._vocab_size)
        return said[:length] + [FILLER] * (length - len(said[:length]))

    def ended(self, index: int, prompt: list[int], answer: list[int]) -> int | None:
        """The turn that has waited for this one, if there is any."""
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

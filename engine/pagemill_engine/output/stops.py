"""Finds stop strings in text that arrives in pieces, and holds back text that may still become one.

Each string is matched by its Knuth-Morris-Pratt automaton, so the cost is constant per character and stop string
however long the strings are, and the result depends only on the text, not on how it was cut: the first match to be
complete wins, and among matches that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Scanned(NamedTuple):
    """The result of one piece of text."""

    text: str
    """Text that is safe to deliver: no stop string can begin in it any more."""
    stop: str | None
    """The stop string that is now complete, or None; no text may follow it."""


class StopMatcher:
    """Watches the text of one choice for its stop strings."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    @property
    def held(self) -> str:
        """Text that is held back because a stop string may have begun in it."""
        return self._held

    def push(self, text: str, *, counts: bool = True) -> Scanned:
        """Process the next piece of text. After a match the matcher must not be used again.

        `counts`: whether a stop string may end in it; if not, one may only begin.
        """
        if not self._automata:
            return Scanned(text, None)
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(char)
            if matched is None or not counts:
                continue
            self._held = ""
            cut = end if self._include_stop else end - len(matched)
            return Scanned(pending[:cut], matched)
        keep = len(pending) - max(automaton.pending for automaton in self._automata)
        self._held = pending[keep:]
        return Scanned(pending[:keep], None)

    def flush(self) -> str:
        """End the text and return what was held back, which is no stop string."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.state = 0
        return held

    def _advance(self, char: str) -> str | None:
        longest: str | None = None
        for automaton in self._automata:
            if automaton.step(char) and (longest is None or len(automaton.pattern) > len(longest)):
                longest = automaton.pattern
        return longest


class _Automaton:
    """Knuth-Morris-Pratt automaton.

    `state`: length of the longest prefix of `pattern` that the text so far ends with.
    """

    __slots__ = ("_fallback", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._fallback = _fallback_table(pattern)

    @property
    def pending(self) -> int:
        """Length of the text that may still become a match: one that was complete, and did not count, may not."""
        return self._fallback[-1] if self.state == len(self.pattern) else self.state

    def step(self, char: str) -> bool:
        state = self.pending
        while state and self.pattern[state] != char:
            state = self._fallback[state - 1]
        if self.pattern[state] == char:
            state += 1
        self.state = state
        return state == len(self.pattern)


def _fallback_table(pattern: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris, Pratt
    1977)."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table

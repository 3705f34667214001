"""Finds the last tokens of a text earlier in it: where they stood, and how many before them agree.

It keeps for every pair of tokens its last place, and for every place the one before with the same pair: a search
compares the most recent places backwards and keeps the longest agreement. Memory is bounded by the window and time per
token and per search by `MAX_PLACES` x `MAX_COMPARED`, whatever the text. Source: the hash chains of LZ77 compressors
(Ziv and Lempel, 1977; RFC 1951, section 4). A suffix automaton finds the longest agreement of all, but takes a hundred
bytes per token, and finds the first place, where the last one is the better guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MAX_PLACES = 32
"""Most earlier places that a search compares."""
MAX_COMPARED = 64
"""Tokens of agreement from which on a place is as good as any."""
WINDOW_TOKENS = 32_768
"""Tokens back to which places are found, at least; half of what is kept at most."""


class Agreement(NamedTuple):
    end: int
    """Index of the token that follows the earlier place."""
    length: int
    """Tokens before it that agree with the last ones; `MAX_COMPARED` stands for any more."""


class TokenHistory:
    def __init__(self) -> None:
        self._first = 0
        """Index of the oldest token with a place."""
        self._num_read = 0
        self._last: dict[tuple[int, int], int] = {}
        """The last index of the second token of each pair, but for the pair at the very end."""
        self._before: array[int] = array("q")
        """For each index from `_first`, the index before it with the same pair, or -1."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Read the tokens that were added to `token_ids` since the last call."""
        start = self._num_read
        if len(token_ids) - self._first > 2 * WINDOW_TOKENS:
            self._first = len(token_ids) - WINDOW_TOKENS
            self._last.clear()
            self._before = array("q")
            start = self._first
        # The pair at the end gets its place with the token behind it: a search must not find itself.
        for index in range(max(start - 1, self._first), len(token_ids) - 1):
            if index == self._first:
                self._before.append(-1)
                continue
            pair = token_ids[index - 1], token_ids[index]
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = index
        self._num_read = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> Agreement | None:
        """Return the earlier place that agrees longest with the end of `token_ids`, the last of equal ones. None if
        its last two tokens do not stand together earlier. Call `extend` with the same tokens before."""
        if len(token_ids) < 2:
            return None
        place = self._last.get((token_ids[-2], token_ids[-1]), -1)
        best: Agreement | None = None
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = self._agreement(token_ids, place)
            if best is None or length > best.length:
                best = Agreement(place + 1, length)
                if length == MAX_COMPARED:
                    break
            place = self._before[place - self._first]
        return best

    def _agreement(self, token_ids: Sequence[int], place: int) -> int:
        """Return how many tokens up to `place` agree with the last ones: at least the pair."""
        length, last = 2, len(token_ids) - 1
        most = min(MAX_COMPARED, place - self._first + 1)
        while length < most and token_ids[place - length] == token_ids[last - length]:
            length += 1
        return length

"""Finds the last tokens of a text earlier in it, or in another text: where they stood, and how many before them agree.

Every three tokens have a bucket in a table, which keeps the last place, and every place keeps the one before in its
bucket: a search compares the most recent places backwards and keeps the longest agreement. A place takes 8 to 12 bytes,
and a token that is added takes a microsecond, whatever the text; a search compares at most `MAX_PLACES` x
`MAX_COMPARED` tokens. Source: the hash chains of LZ77 compressors (Ziv and Lempel, 1977; RFC 1951, section 4). A suffix
automaton finds the longest agreement of all, but takes a hundred bytes per token, and finds the first place, where the
last one is the better guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_AGREEMENT = 3
"""Tokens that must agree: two are common in any text."""
MAX_PLACES = 16
"""Most earlier places that a search compares."""
MAX_COMPARED = 64
"""Tokens of agreement from which on a place is as good as any."""
WINDOW_TOKENS = 32_768
"""Tokens back to which places are found, at least; half of what is kept at most."""
_SINGLE = 64
"""Tokens up to which they are added one by one."""
_A, _B, _C, _SHIFT = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 12


class Agreement(NamedTuple):
    end: int
    """Index of the token that follows the earlier place."""
    length: int
    """Tokens before it that agree with the last ones; `MAX_COMPARED` stands for any more."""


class TokenHistory:
    def __init__(self) -> None:
        self._first = 0
        """Index of the oldest token with a place."""
        self._mask = 0
        """Buckets less one; as many as places at least."""
        self._last: array[int] = array("i", [-1])
        """The last index of the third token of each bucket, but for the three at the very end."""
        self._before: array[int] = array("i")
        """For each index from `_first`, the index before it in the same bucket, or -1."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Read the tokens that were added to `token_ids` since the last call."""
        # The tokens at the end get their place with the token behind them: a search must not find itself.
        end, before, last = len(token_ids) - 1, self._before, self._last
        start = self._first + len(before)
        if end - self._first > min(self._mask, 2 * WINDOW_TOKENS) or end - start > _SINGLE:
            self._read_again(token_ids, end)
            return
        for index in range(start, end):
            if index < self._first + 2:
                before.append(-1)
                continue
            a, b, c = token_ids[index - 2 : index + 1]
            bucket = (a * _A + b * _B + c * _C >> _SHIFT) & self._mask
            before.append(last[bucket])
            last[bucket] = index

    def _read_again(self, token_ids: Sequence[int], end: int) -> None:
        """Give all tokens up to `end` their places, in a table that is large enough for as many again."""
        if end - self._first > 2 * WINDOW_TOKENS:
            self._first = end - WINDOW_TOKENS
        num_places = max(0, end - self._first)
        self._mask = (1 << max(6, (2 * num_places).bit_length())) - 1
        tokens = np.array(token_ids[self._first : end], dtype=np.int64)
        before, last = np.full(num_places, -1, dtype=np.int32), np.full(self._mask + 1, -1, dtype=np.int32)
        if num_places > 2:
            buckets = (tokens[:-2] * _A + tokens[1:-1] * _B + tokens[2:] * _C >> _SHIFT) & self._mask
            order = np.argsort(buckets, kind="stable")
            ordered, places = buckets[order], order + self._first + 2
            is_same = ordered[1:] == ordered[:-1]
            before[order[1:][is_same] + 2] = places[:-1][is_same]
            last[ordered] = places  # of equal buckets the last one stays
        self._before, self._last = array("i", before.tobytes()), array("i", last.tobytes())

    def find(self, text: Sequence[int], token_ids: Sequence[int]) -> Agreement | None:
        """Return the place in `text` that agrees longest with the end of `token_ids`, the last of equal ones; None if
        its last three tokens do not stand together there. `text` is what was read, its last token excepted."""
        if len(token_ids) < LEAST_AGREEMENT:
            return None
        a, b, c = token_ids[-3:]
        place, first = self._last[(a * _A + b * _B + c * _C >> _SHIFT) & self._mask], self._first
        best_place = best = 0
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            # Longer agreements alone are of interest, and most buckets hold other tokens.
            length = _agreement(text, place, token_ids, place - first + 1)
            if length > best:
                best_place, best = place, length
                if length == MAX_COMPARED:
                    break
            place = self._before[place - first]
        return Agreement(best_place + 1, best) if best >= LEAST_AGREEMENT else None


def _agreement(text: Sequence[int], place: int, token_ids: Sequence[int], most: int) -> int:
    """Return how many tokens of `text` up to `place` agree with the last ones of `token_ids`."""
    length, last = 0, len(token_ids) - 1
    most = min(MAX_COMPARED, most, last + 1)
    while length < most and text[place - length] == token_ids[last - length]:
        length += 1
    return length

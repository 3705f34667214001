"""Finds the log probabilities of each text of an answer among those of all its tokens.

An answer also has tokens that are no text of a message: reasoning, calls, markers around them, and the token that ends
it. The texts come in the order of their tokens, so each is looked for behind the one before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import orjson

from pagemill_api.openai.logprobs import PositionLogprobs, chat_position


class TextLogprobs:
    """The log probabilities of one answer, of which `take` and `skip` remove those of texts."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rows: list[bytes] = []
        self._sizes = array("I")
        """The bytes of each token."""
        self._bytes = bytearray()
        """The bytes of the tokens, after the rest of one that was taken already."""
        self._num_taken_bytes = 0
        """The length of that rest."""

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for at in positions:
            row = orjson.dumps(chat_position(at))
            self.num_bytes += len(row)
            self._rows.append(row)
            self._sizes.append(len(at.chosen.token_bytes))
            self._bytes += at.chosen.token_bytes

    def take(self, text: str) -> list[bytes]:
        """Return the entries of the tokens of the next text, as JSON; of all that are left, if it is not theirs."""
        if not self._rows:
            return []
        wanted = text.encode()
        start = self._bytes.find(wanted)
        return self._remove(0, len(self._bytes)) if start < 0 else self._remove(start, start + len(wanted))

    def skip(self, text: str) -> None:
        """Remove the tokens of a text that is not a message's."""
        if self._rows and (start := self._bytes.find(wanted := text.encode())) >= 0:
            self._remove(start, start + len(wanted))

    def _remove(self, start: int, end: int) -> list[bytes]:
        """Remove the tokens before the byte at `end`; return the entries of those with bytes from `start` on."""
        first = last = 0
        place = self._num_taken_bytes
        while last < len(self._rows) and place < end:
            place += self._sizes[last]
            last += 1
            if place <= start:
                first = last
        taken = self._rows[first:last]
        del self._rows[:last], self._sizes[:last], self._bytes[:end]
        self._num_taken_bytes = max(0, place - end)
        return taken

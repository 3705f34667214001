"""Texts of a wanted number of tokens, for a server whose tokenizer is not at hand.

Common words are one token each in most vocabularies; `TextLengths` has measured what they are to this server. The same
seed and name give the same text, so that texts of one name are shared prefixes and all others differ.
"""

from __future__ import annotations

import random
from typing import NamedTuple

COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water"
)


class TextLengths(NamedTuple):
    """How many tokens words are to a server."""

    per_word: float = 1.0

    def num_words(self, num_tokens: int) -> int:
        """Return the words of a text of about so many tokens, at least one."""
        return max(1, round(num_tokens / self.per_word))


def words(name: str, count: int) -> str:
    """Return so many words, which depend on the name only; a longer text begins with the shorter one."""
    return " ".join(random.Random(name).choices(COMMON.split(), k=count))

"""Bad words of several tokens: which tokens would complete one in the next step. Words of one token are forbidden all
the time, by the sampler alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagemill_engine.scheduler.sequence import Sequence


def has_long_bad_words(sequence: Sequence) -> bool:
    return any(len(word) > 1 for word in sequence.sampling.bad_word_token_ids)


def forbidden_tokens(samples: set[str], restricted: Mapping[str, Sequence]) -> dict[str, list[int]]:
    """By sequence of `restricted` that samples; all tokens of each are known."""
    found = {name: _completing(restricted[name]) for name in restricted if name in samples}
    return {name: token_ids for name, token_ids in found.items() if token_ids}


def _completing(sequence: Sequence) -> list[int]:
    longest = max(map(len, sequence.sampling.bad_word_token_ids)) - 1
    output = sequence.token_ids[max(sequence.num_prompt_tokens, len(sequence.token_ids) - longest) :]
    words = [word for word in sequence.sampling.bad_word_token_ids if 1 < len(word) <= len(output) + 1]
    return [word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]]

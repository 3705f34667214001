"""Which tokens may follow in a sequence: by its form, `allowed_token_ids` and `bad_words` together, as one mask.

The grammar of a form is `pagemill_engine.grammar`'s; what is applied to logits is the runner's.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.scheduler.finish import finish_reason
from pagemill_protocol.errors import invalid_field
from pagemill_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_engine.scheduler.sequence import Sequence

Mask = NDArray[np.int32]
"""A bit for each token, 32 a word, the lowest first; 1: it may follow."""


class Restriction:
    """`allowed_token_ids` and `bad_words` of a request; its sequences share it."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        words = sampling.bad_word_token_ids
        allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
        self._mask = _without(_bits(allowed, vocab_size), [word[0] for word in words if len(word) == 1])
        self._words = [word for word in words if len(word) > 1]
        self.depends_on_output = bool(self._words)
        self.num_read = max(map(len, self._words), default=1) - 1
        """Tokens of an output that `mask` depends on: the last ones."""

    def mask(self, tail: list[int]) -> Mask:
        """`tail`: the last `num_read` tokens of the output, or all of a shorter one."""
        ends = [word[-1] for word in self._words if tail[max(0, len(tail) - len(word) + 1) :] == word[:-1]]
        return _without(self._mask, ends) if ends else self._mask


def restriction_of(sampling: SamplingParams, vocab_size: int) -> Restriction | None:
    if sampling.allowed_token_ids is None and not sampling.bad_word_token_ids:
        return None
    return Restriction(sampling, vocab_size)


def begin(sequence: Sequence) -> None:
    """Set what may follow the tokens that a new sequence has. Raises `PagemillError` if nothing may."""
    restriction, grammar = sequence.restriction, sequence.grammar
    if restriction is None and grammar is None:
        return
    sequence.needs_last_token = grammar is not None or (restriction is not None and restriction.depends_on_output)
    if (fault := _find_mask(sequence)) and not sequence.num_resumed_tokens:
        field = "allowed_token_ids" if sequence.sampling.allowed_token_ids is not None else "bad_words"
        raise invalid_field(field, f"The answer cannot begin: {fault}. Remove one of them.")


def advance(sequence: Sequence) -> str:
    """Set what may follow the sequence's newest token. Returns why it cannot go on; empty: it can, or has ended."""
    token_id = sequence.token_ids[-1]
    if token_id in sequence.stop_ids:
        return ""
    if sequence.grammar is not None and (fault := sequence.grammar.advance(token_id)):
        return fault
    if sequence.grammar is not None and sequence.grammar.is_free:
        sequence.grammar = None
        sequence.needs_last_token = sequence.restriction is not None and sequence.restriction.depends_on_output
    return _find_mask(sequence)


def _find_mask(sequence: Sequence) -> str:
    restriction, grammar = sequence.restriction, sequence.grammar
    if restriction is None:
        sequence.token_mask = grammar
        return ""
    first = max(sequence.num_prompt_tokens, len(sequence.token_ids) - restriction.num_read)
    mask = restriction.mask(sequence.token_ids[first:])
    prescribed = None if grammar is None else grammar.mask
    sequence.token_mask = mask = mask if prescribed is None else mask & prescribed
    too_early = sequence.stop_ids if sequence.num_output_tokens < sequence.sampling.min_tokens else ()
    if _without(mask, too_early).any() or (sequence.num_output_tokens and finish_reason(sequence) is not None):
        return ""
    return "its bad_words, allowed_token_ids, min_tokens and form together leave no token that may follow"


def _bits(token_ids: Items[int], vocab_size: int) -> Mask:
    chosen = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    chosen[np.asarray(token_ids)] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def _without(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """A copy."""
    left = mask.copy()
    words = left.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return left

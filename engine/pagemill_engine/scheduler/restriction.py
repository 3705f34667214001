"""`allowed_token_ids` and `bad_words` of a request as a token mask. `token_masks` combines it with the form's mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask: TypeAlias = NDArray[np.int32]
    """Token mask: one bit per token, 32 per word, lowest bit first; 1 means that the token may follow."""


class Restriction:
    """The token restriction of a request (`allowed_token_ids`, `bad_words`); its sequences share it."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        words = sampling.bad_word_token_ids
        allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
        self._mask = without(_bits(allowed, vocab_size), [word[0] for word in words if len(word) == 1])
        self._words = [word for word in words if len(word) > 1]
        self.depends_on_output = bool(self._words)
        self.num_read = max(map(len, self._words), default=1) - 1
        """Number of the last output tokens that `mask` depends on."""

    def mask(self, tail: list[int]) -> Mask:
        """Return the mask of the next token.

        `tail`: the last `num_read` tokens of the output, or all of a shorter one.
        """
        ends = [word[-1] for word in self._words if tail[max(0, len(tail) - len(word) + 1) :] == word[:-1]]
        return without(self._mask, ends) if ends else self._mask


def restriction_of(sampling: SamplingParams, vocab_size: int) -> Restriction | None:
    if sampling.allowed_token_ids is None and not sampling.bad_word_token_ids:
        return None
    return Restriction(sampling, vocab_size)


def _bits(token_ids: Sequence[int], vocab_size: int) -> Mask:
    import numpy as np

    chosen = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    chosen[np.asarray(token_ids)] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def without(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """Return a copy of `mask` that forbids `token_ids`."""
    import numpy as np

    left = mask.copy()
    words = left.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return left

"""Tokenize `bad_words` where a tokenizer is available, so that the sampler needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return `sampling` with the tokens of its `bad_words`: of each word at the start of a text and after a space."""
    if not sampling.bad_words:
        return sampling
    words = [word.lstrip() for word in sampling.bad_words]
    spelled = [tokenizer.encode(space + word, add_special_tokens=False) for word in words for space in ("", " ")]
    distinct = {tuple(token_ids): token_ids for token_ids in spelled if token_ids}
    return msgspec.structs.replace(sampling, bad_word_token_ids=list(distinct.values()))

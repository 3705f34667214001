"""Converts a model's vocabulary into llguidance's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from pagemill_protocol.text.tokenizer import Tokenizer

MAX_CACHED_TEXTS = 1024


class _Tokens:
    """The tokenizer interface of llguidance: the bytes of all tokens, and the tokenization of forced text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._tokenize = lru_cache(MAX_CACHED_TEXTS)(self._tokenize_uncached)
        self.tokenize_greedily: Callable[[str], list[int]] = lambda text: []
        self.eos_token_id = eos_token_id
        # Rows of the logits beyond the tokenizer's vocabulary have no bytes, and are never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(
            token_id for token_id in {*tokenizer.special_ids, eos_token_id} if token_id < vocab_size
        )

    def __call__(self, text: str) -> list[int]:
        """Tokenize text; cached, because every answer of a grammar asks for the same forced text."""
        return list(self._tokenize(text))

    def _tokenize_uncached(self, text: str) -> list[int]:
        """Tokenize as in the model's training, or by longest tokens if the tokenizer changes the text."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if all(token_id < len(self.tokens) for token_id in token_ids):
            spelled = b"".join(self.tokens[token_id] for token_id in token_ids)
            if spelled == text.encode() and self._tokenizer.special_ids.isdisjoint(token_ids):
                return token_ids
        return self.tokenize_greedily(text)


def llguidance_tokenizer(tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """Return llguidance's tokenizer. Raises `ValueError` for a vocabulary that llguidance cannot use."""
    if not eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    tokens = _Tokens(tokenizer, eos_token_ids[0], vocab_size)
    found = LLTokenizer(TokenizerWrapper(tokens), eos_token=list(eos_token_ids))
    tokens.tokenize_greedily = found.greedy_tokenize
    return found

"""A tokenizer with one token per byte: it is downloaded quickly, and any cut may fall inside a character."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagemill_protocol.tokenizer_bundle import TokenizerBundle


def byte_tokenizer(pairs: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Return the tokenizer; `pairs` are pairs of letters that get a token each."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[*pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_bundle(chat_template: str | None = None) -> TokenizerBundle:
    tokenizer_json = byte_tokenizer().to_str()
    return TokenizerBundle(
        tokenizer_json=tokenizer_json, chat_template=chat_template, eos_token_ids=[0], vocab_size=256
    )

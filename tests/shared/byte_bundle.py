"""A tokenizer with one token per byte: small enough to fetch in no time, and any cut may fall inside a character."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagemill_protocol.text.bundle import TokenizerBundle


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_bundle(chat_template: str | None = None) -> TokenizerBundle:
    tokenizer_json = byte_tokenizer().to_str()
    return TokenizerBundle(
        tokenizer_json=tokenizer_json, chat_template=chat_template, eos_token_ids=[0], vocab_size=256
    )

"""A tokenizer with one token per byte: small enough to fetch in no time, and any cut may fall inside a character."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagemill_protocol.text.bundle import TokenizerBundle


def byte_bundle(chat_template: str | None = None) -> TokenizerBundle:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TokenizerBundle(
        tokenizer_json=backend.to_str(), chat_template=chat_template, eos_token_ids=[0], vocab_size=256
    )

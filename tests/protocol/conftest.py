"""Shared by the protocol's tests: a real tokenizer small enough to read, one token per byte."""

from __future__ import annotations

import pytest
from pagemill_protocol.text.bundle import TokenizerBundle
from pagemill_protocol.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """256 tokens, id by byte of its byte-level alphabet; no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    bundle = TokenizerBundle(
        tokenizer_json=backend.to_str(), chat_template=CHAT_TEMPLATE, eos_token_ids=[0], vocab_size=256
    )
    return Tokenizer(bundle)

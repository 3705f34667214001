"""A tokenizer with special tokens of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from pagemill_api.text.tokenizer import Tokenizer


def with_special_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    """Return `tokenizer` with special tokens added; their ids begin at its number of tokens."""
    parsed = json.loads(tokenizer.bundle.tokenizer_json)
    size = tokenizer.bundle.vocab_size
    kind = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parsed["added_tokens"] = [{"id": size + place, "content": text, **kind} for place, text in enumerate(texts)]
    sizes = {"tokenizer_json": json.dumps(parsed), "vocab_size": size + len(texts)}
    return Tokenizer(msgspec.structs.replace(tokenizer.bundle, **sizes))

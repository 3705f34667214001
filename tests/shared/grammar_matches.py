"""Whether a text matches a grammar in Lark's syntax, by the compiler that engines use, with one token per byte."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A tokenizer of one token per byte."""

    eos_token_id = bos_token_id = 256
    tokens = (*(bytes([value]) for value in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return [*(text.encode() if isinstance(text, str) else text)]


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return all(map(matcher.consume_token, text.encode())) and matcher.is_accepting()

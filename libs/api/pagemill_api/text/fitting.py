"""Decide whether a text fits into a context, or find its first tokens, without tokenizing all of a long text.

Tokenizing takes up to 340 bytes of memory and 1.5 microseconds per byte of a text. A text that would be too long even
if all its tokens were the vocabulary's longest is refused by its size; another large one is tokenized in pieces until
these have too many tokens. A text that passes is tokenized whole, because splitting it changes its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

from pagemill_api.text.coverage import Coverage
from pagemill_protocol.errors import beyond_context, context_length_exceeded, invalid_field

PIECE_CHARS = 16 * 1024
PIECE_GROWTH = 4
SPARSE_TEXT_CHARS, SPARSE_TOKEN_CHARS = 1024 * 1024, 16
"""Characters of a truncated text that are tokenized at most: a fixed number, or a number per token to keep."""
CUT_TOKENS = 256
"""Tokens beside a cut within a word that may differ: WordPiece replaces words of more than 100 characters as a
whole."""
SMALL_TEXT_BYTES = 64 * 1024
"""Texts up to this size are tokenized whole at once: counting pieces would cost as much again."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Limit on one text. Contexts of up to a million tokens have less text in any language."""
MAX_NORMALIZED_BYTES = 8 * 1024 * 1024
"""Limit on what one text may become before it is split into tokens. Most tokenizers do not lengthen a text."""
LARGEST_CONTEXT = 1024 * 1024
"""Assumed context length where a model's is not known."""

CountTokens = Callable[[str], int]
Tokens = TypeVar("Tokens", bound=Sized)


def most_bytes(growth: float) -> int:
    """Return the limit on one text. `growth`: most bytes that a byte of it becomes before it is split into tokens."""
    return min(MAX_TEXT_BYTES, int(MAX_NORMALIZED_BYTES / growth))


def check_size(text: bytes, max_tokens: int, coverage: Coverage | None, param: str, most: int) -> None:
    """Refuse a UTF-8 text that must have more than `max_tokens` tokens by its size alone.

    `most`: result of `most_bytes`. Raises `PagemillError` 400.
    """
    num_bytes, max_bytes = len(text), most
    if coverage is not None:
        num_bytes, max_bytes = coverage.num_bytes(text), min(max_tokens * coverage.bytes_per_token, most)
    if num_bytes > max_bytes or len(text) > most:
        raise beyond_context(
            max_tokens,
            f"The prompt has {len(text)} bytes of text and at most {max_bytes} are taken. Shorten the prompt.",
            param,
        )


def check_pieces(text: str, max_tokens: int, longest_entry_bytes: int, count: CountTokens, param: str) -> None:
    """Refuse a text whose pieces have more than `max_tokens` tokens, at the first piece too many.

    A cut changes the tokens beside it, so from each piece twice the bytes of the vocabulary's longest entry are
    subtracted: no text that fits is refused. Raises `PagemillError` 400.
    """
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += max(0, count(text[start : start + PIECE_CHARS]) - 2 * longest_entry_bytes)
        if num_tokens > max_tokens:
            raise context_length_exceeded(num_tokens, max_tokens, param, at_least=True)


def encoded_beginning(
    text: str,
    num_tokens: int,
    longest_entry_bytes: int,
    encode: Callable[[str], Tokens],
    param: str,
    growth: float,
) -> tuple[Tokens, bool]:
    """Return at least the first `num_tokens` tokens, equal to those of the whole text, and whether they are all tokens.

    A cut changes the tokens beside it, so the last ones of a prefix are not counted: twice the bytes of the
    vocabulary's longest entry, at least `CUT_TOKENS`. Raises `PagemillError` 400 where many characters are few tokens,
    such as spaces. `growth`: as in `most_bytes`.
    """
    num_chars = PIECE_CHARS
    most_chars = max(int(SPARSE_TEXT_CHARS / growth), SPARSE_TOKEN_CHARS * num_tokens)
    most_chars = min(most_bytes(growth), most_chars)
    while num_chars < len(text):
        tokens = encode(text[:num_chars])
        if len(tokens) >= num_tokens + max(CUT_TOKENS, 2 * longest_entry_bytes):
            return tokens, False
        if num_chars >= most_chars:
            raise invalid_field(
                param,
                f"`{param}` has {len(text)} characters, of which the first {num_chars} are {len(tokens)} tokens. "
                f"Send at most {num_chars} characters of such text.",
            )
        num_chars = min(most_chars, num_chars * PIECE_GROWTH)
    return encode(text), True

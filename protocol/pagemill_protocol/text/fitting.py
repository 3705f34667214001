"""Whether a text fits into a context, or what its first tokens are, found out without tokenizing all of a long text.

Tokenizing takes up to 340 bytes of memory and 1.5 microseconds for each byte of a text. A text that would be too long
even if all its tokens were the vocabulary's longest is refused by its size; of another large one, pieces are counted
until they are too many. What is left is tokenized whole, because cutting a text changes its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

from pagemill_protocol.errors import beyond_context, context_length_exceeded, invalid_field
from pagemill_protocol.text.coverage import Coverage

PIECE_CHARS = 16 * 1024
PIECE_GROWTH = 4
SPARSE_TEXT_CHARS, SPARSE_TOKEN_CHARS = 1024 * 1024, 16
"""Of a text that is cut, at most so many characters are looked at, or so many for each token that is kept."""
CUT_TOKENS = 256
"""What a cut within a word may change beside it: WordPiece gives up words of more than 100 characters as a whole."""
SMALL_TEXT_BYTES = 64 * 1024
"""Tokenized whole at once: counting pieces would cost as much again."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Of one text. Contexts of up to a million tokens hold less of any language."""
LARGEST_CONTEXT = 1024 * 1024
"""Tokens that are assumed to fit where a model's context is not known."""

CountTokens = Callable[[str], int]
Tokens = TypeVar("Tokens", bound=Sized)


def check_size(text: bytes, max_tokens: int, coverage: Coverage | None, param: str) -> None:
    """Refuse a text in UTF-8 that cannot have as few as `max_tokens` tokens by its size alone.

    Raises `PagemillError` 400.
    """
    num_bytes, max_bytes = len(text), MAX_TEXT_BYTES
    if coverage is not None:
        num_bytes, max_bytes = coverage.num_bytes(text), min(max_tokens * coverage.bytes_per_token, MAX_TEXT_BYTES)
    if num_bytes > max_bytes or len(text) > MAX_TEXT_BYTES:
        raise beyond_context(
            max_tokens,
            f"The prompt has {len(text)} bytes of text and at most {max_bytes} are taken. Shorten the prompt.",
            param,
        )


def check_pieces(text: str, max_tokens: int, longest_entry_bytes: int, count: CountTokens, param: str) -> None:
    """Refuse a text whose pieces have more tokens than `max_tokens`, at the first piece too many.

    A cut changes the tokens beside it. Each piece counts less by twice the bytes of the vocabulary's longest entry, so
    that no text is refused that fits. Raises `PagemillError` 400.
    """
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += max(0, count(text[start : start + PIECE_CHARS]) - 2 * longest_entry_bytes)
        if num_tokens > max_tokens:
            raise context_length_exceeded(f"at least {num_tokens}", max_tokens, param)


def encoded_beginning(
    text: str, num_tokens: int, longest_entry_bytes: int, encode: Callable[[str], Tokens], param: str
) -> tuple[Tokens, bool]:
    """At least the first `num_tokens` tokens, as those of the whole text, and whether they are all that it has.

    A cut changes the tokens beside it: as many as twice the bytes of the vocabulary's longest entry, and as
    `CUT_TOKENS`, do not count. Raises `PagemillError` 400 where many characters bring few tokens, as of spaces.
    """
    num_chars, most_chars = PIECE_CHARS, min(MAX_TEXT_BYTES, max(SPARSE_TEXT_CHARS, SPARSE_TOKEN_CHARS * num_tokens))
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

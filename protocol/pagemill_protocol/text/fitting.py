"""Whether a text fits into a context, found out without tokenizing all of a text that does not.

Tokenizing takes up to 340 bytes of memory and 1.5 microseconds for each byte of a text. A text that would be too long
even if all its tokens were the vocabulary's longest is refused by its size; of another large one, pieces are counted
until they are too many. What is left is tokenized whole, because cutting a text changes its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemill_protocol.errors import beyond_context, context_length_exceeded
from pagemill_protocol.text.coverage import Coverage

PIECE_CHARS = 16 * 1024
SMALL_TEXT_BYTES = 64 * 1024
"""Tokenized whole at once: counting pieces would cost as much again."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Of one text. Contexts of up to a million tokens hold less of any language."""
LARGEST_CONTEXT = 1024 * 1024
"""Tokens that are assumed to fit where a model's context is not known."""

CountTokens = Callable[[str], int]


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

"""Encode texts with a tokenizer in this process: whole, within a number of tokens, truncated, or two as one prompt.

It combines the `tokenizers` library, `segments` and `words` (caches of encodings), `literal_text` (control tokens that
are text) and `fitting` (bounds of texts). `limited_encoder` has the same methods and runs this module in a process of
its own. Thread-safe.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from pagemill_api.text.backend import encode_texts, post_process
from pagemill_api.text.control_tokens import MARK, ControlTokenMarks, without_marks
from pagemill_api.text.coverage import coverage_of, longest_entry_bytes
from pagemill_api.text.fitting import (
    LARGEST_CONTEXT,
    SMALL_TEXT_BYTES,
    check_pieces,
    check_size,
    encoded_beginning,
    most_bytes,
)
from pagemill_api.text.literal_text import LiteralEncoder
from pagemill_api.text.rules.tokenizer_rules import NFC_GROWTH, Rules
from pagemill_api.text.segments import SegmentEncoder
from pagemill_api.text.words import WordEncoder
from pagemill_protocol.errors import context_length_exceeded, invalid_field


class EncodedPair(NamedTuple):
    """Two texts as one prompt."""

    ids: list[int]
    type_ids: list[int]
    """For each token, which of the two texts it is of, as the tokenizer numbers them."""


class LocalEncoder:
    """Encoder of one tokenizer."""

    def __init__(self, tokenizer_json: str, parsed: Any, controls: ControlTokenMarks, rules: Rules) -> None:
        """Read a tokenizer. `parsed`: its JSON. Raises whatever the library raises."""
        self._growth = rules.growth
        self._most_bytes = most_bytes(rules.growth)
        self.backend = Backend.from_str(tokenizer_json)
        self._longest_entry_bytes = longest_entry_bytes(parsed, rules.longest_entry_chars)
        self._coverage = coverage_of(parsed, self._longest_entry_bytes)
        self.segments = SegmentEncoder.of(parsed, self._longest_entry_bytes)
        # Python's expressions are known to find the same words only for expressions of known forms.
        self._words = WordEncoder.of(self.backend, parsed) if not rules.unknown else None
        self._literal = LiteralEncoder(self.backend, parsed, controls)
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises 400 for lone surrogates."""
        as_utf8(text)
        ids: list[int] = self._encode(text, add_special_tokens).ids
        return ids

    def encode_within(
        self,
        text: str,
        max_tokens: int,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        scope: str | None = None,
        shielded: bool = False,
    ) -> list[int]:
        """Encode a text of any size, as `Tokenizer.encode_within`."""
        max_tokens = max_tokens or LARGEST_CONTEXT
        if shielded and MARK in text:
            return self._encode_shielded(text, max_tokens, add_special_tokens, param, scope)
        if self.segments is not None and scope is not None and not add_special_tokens:
            check_size(as_utf8(text), max_tokens, self._coverage, param, self._most_bytes)
            return self.segments.encode(text, max_tokens, self._encode_segment, param, scope)
        self._check_length(text, max_tokens, param)
        ids = self.encode(text, add_special_tokens)
        if len(ids) > max_tokens:
            raise context_length_exceeded(len(ids), max_tokens, param)
        return ids

    def _encode_shielded(
        self, text: str, max_tokens: int, add_special_tokens: bool, param: str, scope: str | None
    ) -> list[int]:
        if self.segments is not None and scope is not None:
            check_size(as_utf8(text), max_tokens, self._coverage, param, self._most_bytes)
            ids = self.segments.encode(text, max_tokens, self._encode_marked_segment, param, f"{scope}{MARK}")
        else:
            self._check_length(without_marks(text), max_tokens, param)
            ids = self._literal.encode(text)
        if add_special_tokens:
            before, after = self._added_around()
            ids = before + ids + after
        if len(ids) > max_tokens:
            raise context_length_exceeded(len(ids), max_tokens, param)
        return ids

    def _encode_marked_segment(self, text: str) -> list[int]:
        return self._literal.section(text, at_start=True) if MARK in text else self._encode_segment(text)

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer adds before and after a text."""
        plain, added = self.encode("a", add_special_tokens=False), self.encode("a")
        at = next(at for at in range(len(added)) if added[at : at + len(plain)] == plain)
        return added[:at], added[at + len(plain) :]

    def encode_cut(self, text: str, num_tokens: int, *, param: str = "prompt") -> list[int]:
        """Return the first `num_tokens` tokens, as `Tokenizer.encode_cut`."""
        as_utf8(text)
        limit = max(0, num_tokens - self.backend.num_special_tokens_to_add(False))
        encoding, _ = self._beginning(text, limit, param)
        encoding.truncate(limit)
        ids: list[int] = post_process(self.backend, encoding, None).ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int, cut: int | None, *, param: str) -> EncodedPair:
        """Encode two texts as one prompt, as `Tokenizer.encode_pair`."""
        max_tokens = max_tokens or LARGEST_CONTEXT
        for text in (first, second):
            if cut is None:
                self._check_length(text, max_tokens, param)
            else:
                as_utf8(text)
        limit = max(0, (max_tokens if cut is None else cut) - self.backend.num_special_tokens_to_add(True))
        if cut is None:
            encodings = encode_texts(self.backend, [first, second], add_special_tokens=False)
        else:
            begun = [self._beginning(text, limit, param) for text in (first, second)]
            encodings = [encoding for encoding, _ in begun]
            # If both texts exceed the limit, the one with more characters counts as the longer one.
            lengths = [
                len(encoding) if is_all else max(len(encoding), len(text))
                for (encoding, is_all), text in zip(begun, (first, second), strict=True)
            ]
            for encoding, length in zip(encodings, _lengths_within(limit, *lengths), strict=True):
                encoding.truncate(length)
        joined = post_process(self.backend, encodings[0], encodings[1])
        if cut is None and len(joined) > max_tokens:
            raise context_length_exceeded(len(joined), max_tokens, param)
        return EncodedPair(joined.ids, joined.type_ids)

    def close(self) -> None:
        """Nothing runs beside this process."""

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Raise `PagemillError` 400 for a text that cannot fit, without tokenizing all of it."""
        raw = as_utf8(text)
        check_size(raw, max_tokens, self._coverage, param, self._most_bytes)
        # Few texts have more tokens than bytes: pieces are counted where all tokens of one would take much memory.
        if len(raw) > max(max_tokens / max(1.0, self._growth / NFC_GROWTH), SMALL_TEXT_BYTES):
            check_pieces(text, max_tokens, self._longest_entry_bytes, self._count, param)

    def _beginning(self, text: str, num_tokens: int, param: str) -> tuple[Encoding, bool]:
        """Return at least the first `num_tokens` tokens, without special ones, and whether they are all tokens."""
        encode = partial(self._encode, add_special_tokens=False)
        return encoded_beginning(text, num_tokens, self._longest_entry_bytes, encode, param, self._growth)

    def _encode_segment(self, text: str) -> list[int]:
        if self._words is not None and self._words.takes(text):
            return self._words.encode(text)
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return ids

    def _count(self, text: str) -> int:
        return len(self._encode(text, add_special_tokens=False))

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        return encode_texts(self.backend, [text], add_special_tokens=add_special_tokens)[0]


def as_utf8(text: str) -> bytes:
    """Return the text in UTF-8. Raises `PagemillError` 400 for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(
            "prompt", f"The text has half a surrogate pair at character {error.start}; send valid Unicode."
        ) from None


def _lengths_within(limit: int, first: int, second: int) -> tuple[int, int]:
    """Return the lengths to which two texts are truncated to fit together: the longer one is truncated first."""
    if first + second <= limit:
        return first, second
    shorter = min(first, second, limit // 2)
    return (shorter, limit - shorter) if first <= second else (limit - shorter, shorter)

"""Incremental detokenization: the text that a stream can show so far, never a partial character.

The joined pieces equal the whole sequence decoded at once, however it was split. The cost per token is constant. Stop
strings are found elsewhere (`pagemill_engine.output`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pagemill_api.text.token_bytes import TokenBytes

_MAX_PENDING_TOKENS = 4
"""A UTF-8 character has at most four bytes, and a token at least one of them."""


class IncrementalDetokenizer:
    """State of one choice. `prompt_ids`: preceding tokens; a text that continues a prompt keeps its leading space."""

    def __init__(self, table: TokenBytes, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_leading_spaces = table.num_leading_spaces
        self._has_own_bytes = False
        self.num_chars = 0
        """Number of characters returned so far."""
        self._prime(prompt_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that became complete with `token_ids`; may be empty."""
        table, skipped = self._table, self._skipped
        raw = b"".join([table[token_id] for token_id in token_ids if token_id not in skipped])
        raw = self._without_leading(raw)
        self._has_own_bytes |= bool(raw)
        text = self._decoder.decode(raw)
        self.num_chars += len(text)
        return text

    def start_of(self, token_id: int) -> int:
        """Return the number of characters before those of `token_id`, which is pushed next.

        A token within a character starts where the character does.
        """
        raw = b"" if token_id in self._skipped else self._table[token_id]
        pending, _ = self._decoder.getstate()
        cuts_character = bool(pending and raw) and raw[0] & 0xC0 != 0x80  # U+FFFD will be before it
        return self.num_chars + cuts_character

    def flush(self) -> str:
        """Return the rest at the end, U+FFFD for an incomplete character, and reset the state."""
        text = self._decoder.decode(b"", final=True) if self._has_own_bytes else ""
        self._decoder.reset()
        self.num_chars += len(text)
        return text

    def _without_leading(self, raw: bytes) -> bytes:
        while self._num_leading_spaces and raw:
            if raw[0] != 0x20:
                self._num_leading_spaces = 0
                break
            raw = raw[1:]
            self._num_leading_spaces -= 1
        return raw

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        """Skip the text of the prompt, but keep the bytes of its last, incomplete character."""
        visible: list[bytes] = []
        for token_id in reversed(prompt_ids):
            raw = b"" if token_id in self._skipped else self._table[token_id]
            if raw:
                visible.append(raw)
            if len(visible) == _MAX_PENDING_TOKENS:
                break
        if visible:
            self._num_leading_spaces = 0
            self._decoder.decode(b"".join(reversed(visible)))

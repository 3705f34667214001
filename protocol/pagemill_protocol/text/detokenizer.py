"""Token ids to text, piece by piece: what a stream can show now, never half a character.

The pieces joined equal the whole sequence decoded at once, however it was cut. Cost per token is constant. Knows
nothing of stop strings (`pagemill_engine.output` does).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pagemill_protocol.text.token_bytes import TokenBytes

_MAX_PENDING_TOKENS = 4
"""A UTF-8 character has at most four bytes, each at least one token's."""


class IncrementalDetokenizer:
    """State of one choice. `prompt_ids`: what came before; a text that continues a prompt keeps its leading space."""

    def __init__(self, table: TokenBytes, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_leading_spaces = table.num_leading_spaces
        self._has_own_bytes = False
        self._prime(prompt_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became complete with `token_ids`; may be empty."""
        table, skipped = self._table, self._skipped
        raw = b"".join([table[token_id] for token_id in token_ids if token_id not in skipped])
        raw = self._without_leading(raw)
        self._has_own_bytes |= bool(raw)
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing. Afterwards it starts anew."""
        text = self._decoder.decode(b"", final=True) if self._has_own_bytes else ""
        self._decoder.reset()
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
        """Skips the text of the prompt but keeps the bytes of a character that it left unfinished."""
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

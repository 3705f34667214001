"""The bytes of each token, read once from a tokenizer's decoder.

Text is always `b"".join(token_bytes(ids))` decoded as UTF-8 with U+FFFD for invalid bytes, after dropping the leading
spaces that SentencePiece adds. This makes incremental detokenization possible at a constant cost per token. Only
decoders that work this way are accepted (byte-level BPE, SentencePiece with byte fallback, Metaspace, WordPiece without
the spaces that it drops before punctuation).
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer as Backend

from pagemill_api.text import byte_level
from pagemill_protocol.source_errors import UnreadableModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """A table `table[token_id]` -> bytes; unknown ids have none.

    `tokenizer_json`: the parsed JSON of the same tokenizer as `backend`.
    """

    def __init__(self, backend: Backend, tokenizer_json: dict[str, Any]) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self.special_ids = frozenset(
            token["id"] for token in tokenizer_json.get("added_tokens") or [] if token.get("special")
        )
        self._literal = {token["id"]: token["content"] for token in tokenizer_json.get("added_tokens") or []}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._continues = ""
        """Prefix of tokens that continue a word; empty: spaces are part of the tokens."""
        self.num_leading_spaces = 0
        """Spaces at the start of a text that are an artifact of the encoding."""
        for step in _flatten(tokenizer_json.get("decoder")):
            self._add_step(step)

    def __getitem__(self, token_id: int) -> bytes:
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if self._byte_level and token_id in self._literal:
            return str(self._literal[token_id]).encode()
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            spelled = byte_level.to_bytes(token)
            return token.encode() if spelled is None else spelled
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._continues:
            is_within = token.startswith(self._continues)
            token = token.removeprefix(self._continues) if is_within else f" {token}"
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()

    def _add_step(self, step: dict[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step.get("content") == " " and not step.get("stop"):
            self.num_leading_spaces = int(step.get("start", 0))
        elif kind == "Metaspace":
            self._replacements.append((step.get("replacement", "▁"), " "))
            prefixed = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            self.num_leading_spaces = 1 if prefixed else 0
        elif kind == "WordPiece":
            self._continues, self.num_leading_spaces = step.get("prefix") or "##", 1
        elif kind != "Fuse":
            raise UnreadableModelError(
                f"the tokenizer's decoder has the step `{kind}`, which is not supported. Supported are byte-level BPE, "
                "SentencePiece with byte fallback, Metaspace and WordPiece decoders."
            )


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        raise UnreadableModelError("the tokenizer has no decoder, so token ids cannot become text.")
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]

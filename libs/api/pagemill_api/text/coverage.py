"""Bounds on the text that one token can represent, read from a tokenizer's JSON.

A text with more bytes than that for each token of a context cannot fit into it, which is known without tokenizing it
(`fitting`). The bound is strict: a tokenizer that may join any number of characters in one token has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagemill_api.text.byte_level import BYTE_OF_CHAR

NFC_SHRINKS_BY = 4
"""Maximum factor by which Unicode normalization form C shortens a text: 7 bytes become 2 at most."""
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits"})
"""Pre-tokenizers that keep every character."""
_KEEPING_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})


class Coverage(NamedTuple):
    bytes_per_token: int
    """Maximum bytes that one token represents, without `dropped` ones."""
    dropped: bytes
    """Bytes that are not in the vocabulary and become no token."""

    def num_bytes(self, text: bytes) -> int:
        """Return the number of bytes of a UTF-8 text that become tokens."""
        return len(text.translate(None, self.dropped)) if self.dropped else len(text)


def coverage_of(tokenizer_json: Mapping[str, Any], longest_bytes: int) -> Coverage | None:
    """Return the bounds, or None where there are none. `longest_bytes`: result of `longest_entry_bytes`."""
    shrinks_by = _normalizer_shrinks_by(tokenizer_json.get("normalizer"))
    if shrinks_by is None or not _keeps_all(tokenizer_json.get("pre_tokenizer")):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in tokenizer_json.get("added_tokens") or []):
        return None  # such a token includes any number of spaces beside it
    dropped = _dropped_bytes(tokenizer_json)
    if dropped is None or (dropped and shrinks_by > 1):
        return None
    return Coverage(shrinks_by * longest_bytes, dropped)


def longest_entry_bytes(tokenizer_json: Mapping[str, Any], longest_chars: int) -> int:
    """Return the bytes of the longest entry of the vocabulary, at least 1. `longest_chars`: its most characters."""
    added = (len(token["content"].encode()) for token in tokenizer_json.get("added_tokens") or [])
    if _is_byte_level(tokenizer_json):  # one character of an entry is one byte
        return max(1, longest_chars, *added)
    return max(1, *(len(entry.encode()) for entry in _vocabulary(tokenizer_json)), *added)


def _vocabulary(tokenizer_json: Mapping[str, Any]) -> Mapping[str, Any]:
    vocabulary = (tokenizer_json.get("model") or {}).get("vocab")
    return vocabulary if isinstance(vocabulary, dict) else {entry[0]: None for entry in vocabulary or []}


def _dropped_bytes(tokenizer_json: Mapping[str, Any]) -> bytes | None:
    """Return bytes that become no token, or None if an unknown character joins others in one unknown token."""
    model, vocabulary = tokenizer_json.get("model") or {}, _vocabulary(tokenizer_json)
    if _is_byte_level(tokenizer_json):
        return bytes(byte for char, byte in BYTE_OF_CHAR.items() if char not in vocabulary)
    has_all = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if model.get("byte_fallback") and has_all else None


def _is_byte_level(tokenizer_json: Mapping[str, Any]) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _steps(tokenizer_json.get("pre_tokenizer"), "pretokenizers"))


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return all(
        step.get("type") in _KEEPING or (step.get("type") == "Split" and step.get("behavior") in _KEEPING_SPLITS)
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _normalizer_shrinks_by(normalizer: Mapping[str, Any] | None) -> int | None:
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step.get("type")
        if kind == "NFC":
            factor *= NFC_SHRINKS_BY
        elif (kind == "Replace" and not _grows(step)) or kind not in ("Prepend", "Replace"):
            return None
    return factor


def _grows(replace: Mapping[str, Any]) -> bool:
    old, new = replace.get("pattern", {}).get("String"), replace.get("content", "")
    return isinstance(old, str) and len(old.encode()) <= len(new.encode())


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for each in part.get(inner, []) for step in _steps(each, inner)]
    return [part]

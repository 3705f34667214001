"""The byte alphabet of byte-level BPE (GPT-2): each of the 256 bytes has one printable character.

Vocabularies store tokens in it; `token_bytes` and `gguf_tokenizer` translate.
"""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTE_OF_CHAR: dict[str, int] = _alphabet()


def to_bytes(token: str) -> bytes | None:
    """Return the bytes of `token`, or None when a character is not in the alphabet."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return None

"""Bound the growth of a text by SentencePiece's precompiled normalization, from its tables.

The tables are a trie of byte sequences (a double array of darts-clone) and the texts that replace them, each of which
ends with a zero byte. The library reads them without checks and panics for places outside of them; such tables are
refused. `tokenizer_rules` asks.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections import defaultdict

MAX_BYTES = 4 * 1024 * 1024
_LABEL = 0x800000FF


class DamagedCharsmap(ValueError):
    """The tables contradict themselves; the message says how."""


def growth_of(encoded: str) -> float:
    """Return the most bytes that replace one byte of a text. Raises `DamagedCharsmap`. `encoded`: in base 64."""
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise DamagedCharsmap("it is not base 64") from None
    num_bytes = int.from_bytes(raw[:4], "little")
    if len(raw) < 8 or len(raw) > MAX_BYTES or num_bytes % 4 or not 4 <= num_bytes <= len(raw) - 4:
        raise DamagedCharsmap(f"its trie of {num_bytes} bytes does not fit into {len(raw)} bytes, or that is too much")
    units = array("I", raw[4 : 4 + num_bytes])
    if sys.byteorder == "big":
        units.byteswap()
    texts = raw[4 + num_bytes :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise DamagedCharsmap("its texts are not UTF-8") from None
    return _growth(units, texts)


def _growth(units: array[int], texts: bytes) -> float:
    """Visit each node once, the ones of short sequences first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        label = unit & _LABEL
        if 0 < label < 256:
            children[index ^ label].append(index)
    growth, num_chars = 1.0, 0
    level, visited = [_checked(units, 0, _offset(units[0]))], set[int]()
    while level:
        num_chars += 1
        following = []
        for index in (index for base in level for index in children.get(base, ())):
            base = _checked(units, index, index ^ _offset(units[index]))
            if units[index] >> 8 & 1:
                growth = max(growth, _num_bytes(texts, units[base] & 0x7FFFFFFF) / num_chars)
            if base not in visited:
                visited.add(base)
                following.append(base)
        level = following
    return growth


def _checked(units: array[int], index: int, base: int) -> int:
    if base | 0xFF >= len(units):
        raise DamagedCharsmap(f"entry {index} of its trie points outside of it")
    return base


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)


def _num_bytes(texts: bytes, start: int) -> int:
    if start > len(texts) or (start < len(texts) and texts[start] & 0xC0 == 0x80):
        raise DamagedCharsmap(f"it replaces a sequence by the text at byte {start}, where none begins")
    end = texts.find(0, start)
    return (end if end >= 0 else len(texts)) - start

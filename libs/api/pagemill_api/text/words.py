"""A cache of the tokens of words: ASCII text is split into words here, and only unknown words go to the library.

Byte-level tokenizers split a text into words by regular expressions and encode each word by itself. Their expressions
are Oniguruma's with Unicode properties; for ASCII text, and only for it, Python's `re` finds the same words with the
properties written out. A pattern that cannot be translated with certainty is not used, nor a translation that splits
`PROBE` differently from the library. `segments` provides the texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as Backend

from pagemill_api.text.backend import encode_texts

MAX_TEXT_CHARS = 16 * 1024
"""Longer texts are encoded by the library: splitting blocks other threads, about 1.5 ms for this length."""
MAX_WORDS = 32 * 1024
"""Maximum number of cached words, after which all are dropped. About 6 MiB."""
MAX_WORD_CHARS = 32
UNKNOWN_SHARE = 8
"""Where more than one in this many words is unknown, the library encodes the whole text, which is cheaper."""
MAX_LEARNED = 16
"""Words of such a text that are also encoded by themselves to be cached."""
PROBE = (
    "It's THE  end,\tcamelCase snake_case I'll we'Ve don'T x1 12 1234567 3.14 $5 a+b==c /* (x) */ \"q\" 'a'  \n\n"
    "  z\r\n.../\n!?~`|\\ {k: [v]}   <|t|> #tag @me 50% a-b; \x0b\x0c \x1c\x1f\x7f end  \n"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of a byte-level step with `use_regex`."""
_NO_CHANGE_TO_ASCII = {"NFC", "NFD", "NFKC", "NFKD"}
_TOKENS = re.compile(
    r"\\p\{(?P<name>[A-Za-z]{1,2})\}|\\(?P<escape>[sSdrntfv\\/.$^|?*+()\[\]{}'\" -])|(?P<plain>[^\\])", re.DOTALL
)
_UNSURE = re.compile(r"\{[\d,]*\}\+|&&|\[:")
"""Syntax that the two languages interpret differently."""
_GROUP = re.compile(r"\(\?(?::|!|=|i:)")
"""Groups of other kinds capture, so that `findall` would return them in place of words, or have another meaning."""
Split = Callable[[str], list[str]]


class WordEncoder:
    """Encoder with a cache of words. Thread-safe."""

    def __init__(self, splits: Iterable[Split], encode: Callable[[list[str]], list[list[int]]]) -> None:
        """Make an encoder. `encode`: returns the tokens of each of several texts."""
        self._splits = tuple(splits)
        self._encode = encode
        self._words: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, backend: Backend, tokenizer_json: Mapping[str, Any]) -> WordEncoder | None:
        """Return an encoder, or None where words would differ or are not encoded by themselves."""
        model, added = tokenizer_json.get("model") or {}, tokenizer_json.get("added_tokens") or []
        splits = _splits(tokenizer_json.get("pre_tokenizer") or {})
        by_itself = model.get("type", "BPE") == "BPE" and not model.get("dropout")
        if splits is None or not by_itself or any(each.get("normalized") for each in added):
            return None
        if not _leaves_ascii(tokenizer_json.get("normalizer")):
            return None

        def encode(texts: list[str]) -> list[list[int]]:
            return [each.ids for each in encode_texts(backend, texts, add_special_tokens=False)]

        found = cls(splits, encode)
        ends = [end for _, (_, end) in backend.pre_tokenizer.pre_tokenize_str(PROBE)]
        return found if ends == _ends(found.words_of(PROBE)) else None

    @property
    def num_words(self) -> int:
        return len(self._words)

    def takes(self, text: str) -> bool:
        return len(text) <= MAX_TEXT_CHARS and text.isascii()

    def words_of(self, text: str) -> list[str]:
        """Split ASCII text into words."""
        words = [text]
        for split in self._splits:
            words = split(text) if len(words) == 1 else list(chain.from_iterable(map(split, words)))
        return words

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that it `takes` and that contains no special token."""
        words, known = self.words_of(text), self._words
        try:
            return list(chain.from_iterable(map(known.__getitem__, words)))
        except KeyError:
            pass
        unknown = [word for word in dict.fromkeys(words) if word not in known]
        if len(unknown) * UNKNOWN_SHARE > len(words):
            (ids,) = self._encode([text])
            self._learn(unknown[:MAX_LEARNED])
            return ids
        fresh = self._learn(unknown)
        return list(chain.from_iterable([fresh[word] if word in fresh else known[word] for word in words]))

    def _learn(self, words: list[str]) -> dict[str, tuple[int, ...]]:
        fresh = dict(zip(words, map(tuple, self._encode(words)), strict=True))
        kept = {word: ids for word, ids in fresh.items() if len(word) <= MAX_WORD_CHARS}
        if len(self._words) + len(kept) > MAX_WORDS:
            self._words = {}  # another thread may read the old dict
        if len(kept) <= MAX_WORDS:
            self._words.update(kept)
        return fresh


def ascii_pattern(pattern: str) -> str | None:
    """Return an equivalent pattern of Python's `re` for ASCII text, or None without certainty."""
    if _UNSURE.search(pattern):
        return None
    parts: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        token = _TOKENS.match(pattern, at)
        if token is None:
            return None
        plain = token["plain"] or ""
        if _is_ambiguous(plain, pattern, at, in_class):
            return None
        in_class = plain == "[" or (in_class and plain != "]")
        members = _members(token["name"]) if token["name"] else token[0]
        parts.append(f"[{members}]" if token["name"] and not in_class else members)
        at = token.end()
    return "".join(parts)


def _is_ambiguous(plain: str, pattern: str, at: int, in_class: bool) -> bool:
    """Whether an unescaped character may mean something else in the other language."""
    if in_class:
        return plain == "["
    return plain in ("^", "$") or (plain == "(" and _GROUP.match(pattern, at) is None)


def _members(category: str) -> str:
    """Return the ASCII characters of a Unicode category, for a class."""
    of_it = [code for code in range(128) if unicodedata.category(chr(code)).startswith(category)]
    return "".join(f"\\x{code:02x}" for code in of_it)


def _splits(step: Mapping[str, Any]) -> list[Split] | None:
    """Return the pre-tokenizer's splits, or None if a part of it is of another kind or does not end by mapping
    bytes."""
    steps: list[Mapping[str, Any]] = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    patterns = [_pattern(each) for each in steps[:-1]]
    if steps[-1].get("use_regex", True):
        patterns.append(GPT2)
    splits: list[Split] = []
    for pattern in patterns:
        translated = ascii_pattern(pattern) if pattern is not None else None
        if translated is None:
            return None
        try:
            splits.append(_split(translated))
        except re.error:  # such as a class without ASCII characters
            return None
    return splits


def _pattern(step: Mapping[str, Any]) -> str | None:
    if step.get("type") == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    isolates = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
    pattern = (step.get("pattern") or {}).get("Regex") if isolates else None
    return pattern if isinstance(pattern, str) else None


def _split(pattern: str) -> Split:
    """Return a function that splits a text into matches and the text between them."""
    find = re.compile(pattern, re.ASCII).findall
    cut = re.compile(f"({pattern})", re.ASCII).split

    def split(text: str) -> list[str]:
        words: list[str] = find(text)
        return words if sum(map(len, words)) == len(text) else [each for each in cut(text) if each]

    return split


def _leaves_ascii(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None or normalizer.get("type") in _NO_CHANGE_TO_ASCII:
        return True
    return normalizer.get("type") == "Sequence" and all(map(_leaves_ascii, normalizer["normalizers"]))


def _ends(words: list[str]) -> list[int]:
    ends, end = [], 0
    for word in words:
        end += len(word)
        ends.append(end)
    return ends

"""Encode a chat by the segments between its special tokens, and cache earlier segments.

A tokenizer splits a text at its special tokens first and encodes each segment between them by itself. So a system
prompt, and each earlier message of a conversation, are tokenized once: their tokens do not depend on what follows. This
is not valid for every tokenizer; `SegmentEncoder.of` decides. `fitting` bounds the length of a text; `tokenizer` calls
this module.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pagemill_api.text.fitting import check_pieces
from pagemill_protocol.errors import context_length_exceeded
from pagemill_protocol.source_errors import UnreadableModelError

MAX_KEPT_TOKENS = 1024 * 1024
"""Maximum tokens of all cached segments, with `ENTRY_TOKENS` for each: some 10 MiB with their texts."""
ENTRY_TOKENS = 32
"""The memory of a cached segment besides its tokens and their text (300 bytes), as tokens: short ones are many."""
MAX_SEGMENT_TOKENS = MAX_KEPT_TOKENS // 8
"""A longer segment is not cached: it would displace too many others."""
LONG_SEGMENT_CHARS = 64 * 1024
"""Pieces of a longer, unknown segment are counted before it is tokenized."""

_Key = tuple[str, str]
MAX_TRIED = 512
"""Most alternatives that one place of a text may try."""
MAX_BRANCHES = 1024
"""Most of them for any search of control tokens; `MAX_TRIED` is for caches, which are not needed."""
MAX_DEPTH = 24
"""Most nodes with several alternatives on one path: a nested group each."""
_END = ""
_Node = dict[str, Any]


class SegmentEncoder:
    """Encoder with a cache of segments. Thread-safe."""

    def __init__(self, special_ids: Mapping[str, int], pattern: re.Pattern[str], longest_entry_bytes: int) -> None:
        """Make an encoder. `special_ids`: ids by text of the tokens that split a text, which `pattern` finds."""
        self._special_ids = dict(special_ids)
        self._pattern = pattern
        self._longest_entry_bytes = longest_entry_bytes
        self._kept: OrderedDict[_Key, array[int]] = OrderedDict()
        self._num_kept_tokens = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer_json: Mapping[str, Any], longest_entry_bytes: int) -> SegmentEncoder | None:
        """Return an encoder, or None where a segment's tokens depend on its surroundings or nothing splits texts."""
        added = [token for token in tokenizer_json.get("added_tokens") or [] if not token.get("normalized")]
        special_ids = {token["content"]: token["id"] for token in added if token["content"]}
        looks_around = any(token.get(rule) for token in added for rule in ("lstrip", "rstrip", "single_word"))
        is_random = bool((tokenizer_json.get("model") or {}).get("dropout"))
        if not special_ids or looks_around or is_random or _depends_on_text_start(tokenizer_json):
            return None
        pattern = token_pattern(frozenset(special_ids))
        return None if pattern is None else cls(special_ids, pattern, longest_entry_bytes)

    @property
    def num_kept_tokens(self) -> int:
        return self._num_kept_tokens

    def encode(
        self, text: str, max_tokens: int, encode: Callable[[str], list[int]], param: str, scope: str
    ) -> list[int]:
        """Return the tokens of `text`, without those that a tokenizer adds around it.

        Raises `PagemillError` 400 for more than `max_tokens`, as soon as that is known. `encode`: encodes one segment.
        `scope`: requests of another scope cannot learn from timing what was encoded in this one. `param`: the request's
        field of the text.
        """
        ids: list[int] = []
        start = 0
        for special in self._pattern.finditer(text):
            if special.start() > start:
                ids.extend(self._segment(text[start : special.start()], max_tokens, encode, param, scope))
            ids.append(self._special_ids[special.group()])
            start = special.end()
            if len(ids) > max_tokens:
                raise context_length_exceeded(len(ids), max_tokens, param, at_least=True)
        if start < len(text):
            ids.extend(self._segment(text[start:], max_tokens, encode, param, scope))
        if len(ids) > max_tokens:
            raise context_length_exceeded(len(ids), max_tokens, param)
        return ids

    def marks(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the end of each special token in `text`, and the number of tokens up to it; none if `token_ids` are
        not those of the text."""
        found, count = [], 0
        try:
            for special in self._pattern.finditer(text):
                count = token_ids.index(self._special_ids[special.group()], count) + 1
                found.append((special.end(), count))
        except ValueError:  # control tokens in messages are encoded as text
            return []
        return found

    def _segment(
        self, text: str, max_tokens: int, encode: Callable[[str], list[int]], param: str, scope: str
    ) -> Sequence[int]:
        key = scope, text
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        if len(text) > max(max_tokens, LONG_SEGMENT_CHARS):
            check_pieces(text, max_tokens, self._longest_entry_bytes, lambda piece: len(encode(piece)), param)
        ids = encode(text)
        if len(ids) <= MAX_SEGMENT_TOKENS:
            self._keep(key, array("I", ids))
        return ids  # int objects may be shared with other texts (`words`), unlike those of an array

    def _keep(self, key: _Key, ids: array[int]) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = ids
            self._num_kept_tokens += len(ids) + ENTRY_TOKENS
            while self._num_kept_tokens > MAX_KEPT_TOKENS:
                _, oldest = self._kept.popitem(last=False)
                self._num_kept_tokens -= len(oldest) + ENTRY_TOKENS


def _depends_on_text_start(step: Any) -> bool:
    """Whether a step of the tokenizer treats the beginning of a whole text differently from that of a segment."""
    if isinstance(step, Mapping):
        parts = (value for key, value in step.items() if key not in ("vocab", "merges", "added_tokens"))
        return step.get("prepend_scheme") == "first" or any(map(_depends_on_text_start, parts))
    return isinstance(step, list) and any(map(_depends_on_text_start, step))


@lru_cache(maxsize=4)
def token_pattern(tokens: frozenset[str]) -> re.Pattern[str] | None:
    """Return `longest_token_pattern`, which takes long to make and which a tokenizer needs several times."""
    return longest_token_pattern(sorted(tokens))


def longest_token_pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the longest token at a place, or None where that may take long.

    Alternatives that are tried one after the other take time in proportion to their number wherever tokens begin alike:
    with the 6,400 unused tokens of Gemma, 40 microseconds for each `<`. Here they share the nodes of a trie. `tokens`:
    at least one, none of them empty.
    """
    try:
        return re.compile(_source(_trie(tokens), MAX_TRIED, MAX_DEPTH))
    except _TooWide:
        return None


def check_added_tokens(tokenizer_json: Mapping[str, Any]) -> None:
    """Raise `UnreadableModelError` for added tokens that take long to be searched for at one place of a text."""
    contents = [token["content"] for token in tokenizer_json.get("added_tokens") or [] if token["content"]]
    try:
        _source(_trie(contents), MAX_BRANCHES, MAX_BRANCHES)
    except _TooWide:
        raise UnreadableModelError(
            f"the model's tokenizer cannot be used: `added_tokens`: more than {MAX_BRANCHES} alternatives may be tried "
            "at one place of a text. Use the tokenizer of the model's training."
        ) from None


def _trie(tokens: Iterable[str]) -> _Node:
    root: _Node = {}
    for token in tokens:
        node = root
        for char in token:
            node = node.setdefault(char, {})
        node[_END] = {}
    return root


class _TooWide(Exception):
    """A place of a text may try too many alternatives."""


def _source(node: _Node, num_left: int, depth_left: int) -> str:
    """Return the pattern of what may follow a node."""
    beginning = []
    while len(node) == 1 and _END not in node:
        ((char, node),) = node.items()
        beginning.append(re.escape(char))
    following = [(char, after) for char, after in node.items() if char != _END]
    if not following:
        return "".join(beginning)
    ends = "".join(re.escape(char) for char, after in following if after.keys() == {_END})
    longer = [(char, after) for char, after in following if after.keys() != {_END}]
    num_options = len(longer) + bool(ends)  # a set of characters is looked up at once
    if num_options > num_left or not depth_left:
        raise _TooWide
    left = num_left - num_options
    options = [re.escape(char) + _source(after, left, depth_left - 1) for char, after in longer]
    options += [f"[{ends}]"] if ends else []
    return f"{''.join(beginning)}(?:{'|'.join(options)}){'?' if _END in node else ''}"

"""Tokenize rendered chats in which some control tokens are text (`control_tokens` marks them).

A text is split at the control tokens without a mark, as every tokenizer does; the sections between them are tokenized
by a tokenizer without control tokens, which shares the model of the usual one and so takes no memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagemill_api.text.backend import encode_texts
from pagemill_api.text.control_tokens import ControlTokenMarks, pattern_of, without_marks


class LiteralEncoder:
    """Encoder of texts with marks. Thread-safe."""

    def __init__(self, backend: Backend, tokenizer_json: Mapping[str, Any], controls: ControlTokenMarks) -> None:
        added: list[Mapping[str, Any]] = tokenizer_json.get("added_tokens") or []
        split = {each["content"]: each for each in added if each["content"] and not each.get("normalized")}
        self._split = {text: each for text, each in split.items() if not each.get("single_word")}
        self._pattern = pattern_of(frozenset(self._split))
        others = [each for each in added if each.get("normalized") and each["content"] not in controls.texts]
        self._ids = {each["content"]: each["id"] for each in added}
        self._control_ids = {self._ids[text]: text for text in controls.texts}
        self._at_start = self._plain(backend, tokenizer_json, others)
        self._within = self._plain(backend, _continuing(tokenizer_json), others)
        self._renumbered = {self._at_start.token_to_id(each["content"]): each["id"] for each in others}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that a tokenizer adds around it."""
        ids: list[int] = []
        start, strips = 0, False
        for found in self._pattern.finditer(text):
            token = self._split[found[0]]
            section = text[start : found.start()]
            section = section.rstrip() if token.get("lstrip") else section
            ids += self.section(section.lstrip() if strips else section, at_start=start == 0)
            ids.append(token["id"])
            start, strips = found.end(), bool(token.get("rstrip"))
        rest = text[start:]
        return ids + self.section(rest.lstrip() if strips else rest, at_start=start == 0)

    def section(self, text: str, *, at_start: bool = False) -> list[int]:
        """Return the tokens of a section that contains no control token but those with marks."""
        if not text:
            return []
        backend = self._at_start if at_start else self._within
        found = encode_texts(backend, [without_marks(text)], add_special_tokens=False)[0].ids
        if self._renumbered:
            found = [self._renumbered.get(each, each) for each in found]
        if self._control_ids.keys().isdisjoint(found):
            return found
        spelled = [self._spelled(each) if each in self._control_ids else [each] for each in found]
        return [each for ids in spelled for each in ids]

    def _spelled(self, token_id: int) -> list[int]:
        """Return the characters of a control token that is also an entry of the vocabulary."""
        ids: list[int] = []
        for char in self._control_ids[token_id]:
            known = self._at_start.token_to_id(char)
            pieces = [known] if known is not None else map(self._at_start.token_to_id, map(_byte_token, char.encode()))
            ids += [each for each in pieces if each is not None]
        return ids

    def _plain(self, backend: Backend, tokenizer_json: Mapping[str, Any], others: list[Mapping[str, Any]]) -> Backend:
        plain = Backend(backend.model)
        steps = {name: tokenizer_json.get(name) for name in ("normalizer", "pre_tokenizer")}
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        read = Backend.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": empty, **steps}))
        if read.normalizer is not None:
            plain.normalizer = read.normalizer
        if read.pre_tokenizer is not None:
            plain.pre_tokenizer = read.pre_tokenizer
        names = ("single_word", "lstrip", "rstrip", "normalized")
        plain.add_tokens(
            [AddedToken(each["content"], **{name: bool(each.get(name)) for name in names}) for each in others]
        )
        return plain


def _byte_token(value: int) -> str:
    return f"<0x{value:02X}>"


def _continuing(step: Any) -> Any:
    """Return the steps for a section that is not at the start of a text."""
    if isinstance(step, Mapping):
        found = {name: _continuing(each) for name, each in step.items() if name not in ("model", "added_tokens")}
        return {**found, "prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else found
    return [_continuing(each) for each in step] if isinstance(step, list) else step

"""Encode texts for models that pool: prepended prompts, pairs, and truncation where asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from pagemill_protocol.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    PagemillError,
    beyond_context,
    context_length_exceeded,
    invalid_field,
    show,
)
from pagemill_protocol.request.pooling import PoolingSpec

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


class Pair(NamedTuple):
    token_ids: list[int]
    second_segment: int
    """Index of the second text's first token; 0: the tokenizer does not distinguish the texts."""


class TextEncoder:
    def __init__(self, tokenizer: Tokenizer, spec: PoolingSpec, max_tokens: int, truncate: int | None) -> None:
        """Prepare the encoding of one request's texts.

        `max_tokens`: limit of the model; 0: not known. `truncate`: the client's `truncate_prompt_tokens`.
        """
        self._tokenizer, self._spec = tokenizer, spec
        self._max_tokens = max_tokens
        self._cut = max_tokens if truncate == -1 else truncate
        if truncate is not None and max_tokens and truncate > max_tokens:
            raise invalid_field(
                "truncate_prompt_tokens",
                f"`truncate_prompt_tokens` is {truncate}; this model takes {max_tokens} tokens. Send at most that.",
            )

    def prompt(self, name: str | None) -> str:
        """Return the text that is prepended to each text. Raises `PagemillError` 400 for an unknown prompt."""
        prompts = self._spec.prompts
        if name is None:
            return self._spec.default_prompt
        if name not in prompts:
            known = f"it has {', '.join(prompts)}" if prompts else "it has none"
            raise invalid_field("prompt_name", f"This model has no prompt {show(name)}: {known}.")
        return prompts[name]

    def text(self, text: str | list[int], param: str, before: str = "") -> list[int]:
        """Encode a text; token ids are only truncated."""
        if isinstance(text, str):
            token_ids = self._encoded(self._lowercased(before + text), param)
        else:
            token_ids = text[: self._cut] if self._cut else text
            self._check(token_ids, param)
        if not token_ids:
            raise _empty(param)
        return token_ids

    def pair(self, first: str, second: str, param: str) -> Pair:
        """Encode two texts as one prompt, joined by the tokenizer. `param`: field of the second text."""
        texts = self._lowercased(first), self._lowercased(second)
        with self._with_truncation_remedy(param):
            pair = self._tokenizer.encode_pair(*texts, self._max_tokens, self._cut, param=param)
        if not pair.ids:
            raise _empty(param)
        types = pair.type_ids
        return Pair(pair.ids, types.index(1) if 1 in types else 0)

    def _encoded(self, text: str, param: str) -> list[int]:
        if self._cut:
            return self._tokenizer.encode_cut(text, self._cut, param=param)
        with self._with_truncation_remedy(param):
            return self._tokenizer.encode_within(text, self._max_tokens, param=param)

    @contextmanager
    def _with_truncation_remedy(self, param: str) -> Iterator[None]:
        """Extend errors about the length by the remedy that a text, unlike a prompt to answer, may be truncated."""
        try:
            yield
        except PagemillError as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED:
                raise
            remedy = "Shorten it, or send `truncate_prompt_tokens` -1 to have it cut."
            raise beyond_context(self._max_tokens, f"`{param}` has more. {remedy}", param) from None

    def _lowercased(self, text: str) -> str:
        return text.lower() if self._spec.lower_case else text

    def _check(self, token_ids: list[int], param: str) -> None:
        largest, vocab_size = max(token_ids, default=0), self._tokenizer.vocab_size
        if largest >= vocab_size:
            raise invalid_field(
                param, f"`{param}` has the token id {largest}; this model's token ids go from 0 to {vocab_size - 1}."
            )
        if self._max_tokens and len(token_ids) > self._max_tokens:
            with self._with_truncation_remedy(param):
                raise context_length_exceeded(len(token_ids), self._max_tokens, param)


def _empty(param: str) -> PagemillError:
    return invalid_field(param, f"`{param}` has no tokens. Send some text.")

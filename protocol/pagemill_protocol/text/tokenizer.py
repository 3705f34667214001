"""A model's tokenizer as the front doors and the output process use it: encode, render a chat, decode, stream text.

A thin face over the `tokenizers` library (encoding), `segments` and `words` (which remember what was encoded),
`chat_template` (rendering) and `detokenizer` (decoding).
Safe to use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import orjson
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from pagemill_protocol.errors import context_length_exceeded, invalid_field
from pagemill_protocol.malloc import give_back
from pagemill_protocol.source_errors import UnreadableModelError
from pagemill_protocol.text.bundle import TokenizerBundle
from pagemill_protocol.text.chat_template import ChatTemplate
from pagemill_protocol.text.coverage import coverage_of, longest_entry_bytes
from pagemill_protocol.text.detokenizer import IncrementalDetokenizer
from pagemill_protocol.text.fitting import (
    LARGEST_CONTEXT,
    SMALL_TEXT_BYTES,
    check_pieces,
    check_size,
    encoded_beginning,
)
from pagemill_protocol.text.segments import SegmentEncoder
from pagemill_protocol.text.token_bytes import TokenBytes
from pagemill_protocol.text.words import WordEncoder


class Tokenizer:
    """`chat_template` overrides the bundle's. Raises `SourceError` when the bundle cannot be used."""

    def __init__(self, bundle: TokenizerBundle, chat_template: str | None = None) -> None:
        self.bundle = bundle
        try:
            self._backend = Backend.from_str(bundle.tokenizer_json)
            parsed = orjson.loads(bundle.tokenizer_json)
            self._table = TokenBytes(self._backend, parsed)
            self._coverage = coverage_of(parsed)
            self._longest_entry_bytes = longest_entry_bytes(parsed)
            self._segments = SegmentEncoder.of(parsed, self._longest_entry_bytes)
            self._words = WordEncoder.of(self._backend, parsed)
        except UnreadableModelError:
            raise
        except Exception as error:  # the library raises plain `Exception`
            raise UnreadableModelError(f"the model's tokenizer cannot be loaded: {str(error)[:300]}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_ids = list(bundle.eos_token_ids)
        self.vocab_size = max(bundle.vocab_size, self._backend.get_vocab_size())
        """Rows of the logits."""
        self.chat_template = ChatTemplate(bundle, override=chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it become their ids. 400 for lone surrogates."""
        _as_utf8(text)
        ids: list[int] = self._encode(text, add_special_tokens).ids
        return ids

    def encode_within(
        self,
        text: str,
        max_tokens: int,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        scope: str | None = None,
    ) -> list[int]:
        """As `encode`, for a text of any size: 400 for one of more than `max_tokens`, without tokenizing all of it.

        `max_tokens` 0: not known. `param`: the request's field that holds the text. `scope`: parts are remembered
        for texts of the same one; `None`: not at all.
        """
        max_tokens = max_tokens or LARGEST_CONTEXT
        if self._segments is not None and scope is not None and not add_special_tokens:
            check_size(_as_utf8(text), max_tokens, self._coverage, param)
            return self._segments.encode(text, max_tokens, self._encode_segment, param, scope)
        self._check_length(text, max_tokens, param)
        ids = self.encode(text, add_special_tokens)
        if len(ids) > max_tokens:
            raise context_length_exceeded(len(ids), max_tokens, param)
        return ids

    def encode_cut(self, text: str, num_tokens: int, *, param: str = "prompt") -> list[int]:
        """As `encode`, of as much of the text's beginning as gives so many tokens, special ones included; no more of it
        is tokenized than that takes. `param`: the request's field that holds the text."""
        _as_utf8(text)
        room = max(0, num_tokens - self._backend.num_special_tokens_to_add(False))
        encoding, _ = self._beginning(text, room, param)
        encoding.truncate(room)
        ids: list[int] = self._backend.post_process(encoding, None, True).ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int, cut: int | None, *, param: str) -> Encoding:
        """Two texts in one prompt, as the tokenizer joins them. The longer one is cut to `cut` tokens of both; without,
        400 for more than `max_tokens` (0: not known). `param`: the request's field that holds the second text."""
        max_tokens = max_tokens or LARGEST_CONTEXT
        for text in (first, second):
            if cut is None:
                self._check_length(text, max_tokens, param)
            else:
                _as_utf8(text)
        room = max(0, (max_tokens if cut is None else cut) - self._backend.num_special_tokens_to_add(True))
        if cut is None:
            encodings = self._backend.encode_batch_fast([first, second], add_special_tokens=False)
        else:
            begun = [self._beginning(text, room, param) for text in (first, second)]
            encodings = [encoding for encoding, _ in begun]
            # Of two texts that are both longer than the room the one with more characters counts as the longer one.
            lengths = [
                len(encoding) if is_all else max(len(encoding), len(text))
                for (encoding, is_all), text in zip(begun, (first, second), strict=True)
            ]
            for encoding, length in zip(encodings, _lengths_within(room, *lengths), strict=True):
                encoding.truncate(length)
        joined: Encoding = self._backend.post_process(encodings[0], encodings[1], True)
        if cut is None and len(joined) > max_tokens:
            raise context_length_exceeded(len(joined), max_tokens, param)
        return joined

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Raises `PagemillError` 400 for a text that cannot fit, without tokenizing all of it."""
        raw = _as_utf8(text)
        check_size(raw, max_tokens, self._coverage, param)
        if len(raw) > max(max_tokens, SMALL_TEXT_BYTES):  # no text has more tokens than bytes
            check_pieces(text, max_tokens, self._longest_entry_bytes, self._count, param)

    def _beginning(self, text: str, num_tokens: int, param: str) -> tuple[Encoding, bool]:
        """At least so many tokens of it, without special ones; whether they are all."""
        encode = partial(self._encode, add_special_tokens=False)
        return encoded_beginning(text, num_tokens, self._longest_entry_bytes, encode, param)

    def _encode_segment(self, text: str) -> list[int]:
        if self._words is not None and self._words.takes(text):
            return self._words.encode(text)
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return ids

    def _count(self, text: str) -> int:
        return len(self._encode(text, add_special_tokens=False))

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        # The batch call lets other threads run meanwhile, which `encode` does not, and computes no offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh stream whose text continues `prompt_ids`."""
        return IncrementalDetokenizer(self._table, prompt_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for; special tokens spell themselves."""
        return self._table[token_id]

    def has_token(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary."""
        return self._backend.token_to_id(text) is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: they spell themselves, and `decode` leaves them out."""
        return self._table.special_ids

    def token_text(self, token_id: int) -> str:
        """The token alone as text, as log probabilities show it; U+FFFD for parts of a character."""
        return self._table[token_id].decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, time limited; `PagemillError` 400 when messages and template do not fit.

        The text holds its own special tokens: encode it with `add_special_tokens=False`.
        """
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def warm_up(self) -> None:
        """Do now what the first chat would wait for, and give back the memory that reading the vocabulary took."""
        self.chat_template.prepare()
        give_back()

    def close(self) -> None:
        """Stops the template process, if one runs. Also happens when the tokenizer is collected."""
        self.chat_template.close()


def _lengths_within(room: int, first: int, second: int) -> tuple[int, int]:
    """What is left of two texts of so many tokens where they may have `room` together: the longer one is cut first."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def _as_utf8(text: str) -> bytes:
    """Raises `PagemillError` 400 for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(
            "prompt", f"The text has half a surrogate pair at character {error.start}; send valid Unicode."
        ) from None

"""A model's tokenizer for HTTP servers and output processing: encode, render a chat, decode, stream text.

It combines the `tokenizers` library (encoding), `rules` (what a model's file may ask for), `segments` and `words`
(caches of encodings), `chat_template` (rendering) and `detokenizer` (decoding). Thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import orjson
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from pagemill_api.text.backend import encode_texts, loading, post_process
from pagemill_api.text.control_tokens import MARK, ControlTokenMarks, without_marks
from pagemill_api.text.coverage import coverage_of, longest_entry_bytes
from pagemill_api.text.detokenizer import IncrementalDetokenizer
from pagemill_api.text.fitting import (
    LARGEST_CONTEXT,
    SMALL_TEXT_BYTES,
    check_pieces,
    check_size,
    encoded_beginning,
)
from pagemill_api.text.literal_text import LiteralEncoder
from pagemill_api.text.rules.tokenizer_rules import MAX_JSON_BYTES, NFC_GROWTH, check_rules
from pagemill_api.text.segments import SegmentEncoder, check_added_tokens
from pagemill_api.text.template.chat_template import ChatTemplate
from pagemill_api.text.token_bytes import TokenBytes
from pagemill_api.text.words import WordEncoder
from pagemill_protocol.errors import context_length_exceeded, invalid_field
from pagemill_protocol.source_errors import UnreadableModelError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle


class Tokenizer:
    """A model's tokenizer. `chat_template` overrides the bundle's. Raises `SourceError` for an unusable bundle."""

    def __init__(self, bundle: TokenizerBundle, chat_template: str | None = None) -> None:
        self.bundle = bundle
        with loading():
            parsed = _parsed(bundle.tokenizer_json)
            self._growth = check_rules(parsed)
            check_added_tokens(parsed)
            self._backend = Backend.from_str(bundle.tokenizer_json)
            self._table = TokenBytes(self._backend, parsed)
            self._coverage = coverage_of(parsed)
            self._longest_entry_bytes = longest_entry_bytes(parsed)
            self._segments = SegmentEncoder.of(parsed, self._longest_entry_bytes)
            self._words = WordEncoder.of(self._backend, parsed)
            self.control_tokens = ControlTokenMarks(parsed)
            self._literal = LiteralEncoder(self._backend, parsed, self.control_tokens)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_ids = list(bundle.eos_token_ids)
        self.vocab_size = max(bundle.vocab_size, self._backend.get_vocab_size())
        """Number of rows of the logits."""
        self.chat_template = ChatTemplate(bundle, override=chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it become their ids. Raises 400 for lone
        surrogates."""
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
        shielded: bool = False,
    ) -> list[int]:
        """Encode as `encode`, a text of any size: raises 400 beyond `max_tokens`, without tokenizing all of it.

        `max_tokens` 0: not known. `param`: the request's field of the text. `scope`: segments are cached for texts of
        the same scope; `None`: no caching. `shielded`: marked control tokens in the text are text (`control_tokens`).
        """
        max_tokens = max_tokens or LARGEST_CONTEXT
        if shielded and MARK in text:
            return self._encode_shielded(text, max_tokens, add_special_tokens, param, scope)
        if self._segments is not None and scope is not None and not add_special_tokens:
            check_size(_as_utf8(text), max_tokens, self._coverage, param, self._growth)
            return self._segments.encode(text, max_tokens, self._encode_segment, param, scope)
        self._check_length(text, max_tokens, param)
        ids = self.encode(text, add_special_tokens)
        if len(ids) > max_tokens:
            raise context_length_exceeded(len(ids), max_tokens, param)
        return ids

    def _encode_shielded(
        self, text: str, max_tokens: int, add_special_tokens: bool, param: str, scope: str | None
    ) -> list[int]:
        if self._segments is not None and scope is not None:
            check_size(_as_utf8(text), max_tokens, self._coverage, param)
            ids = self._segments.encode(text, max_tokens, self._encode_marked_segment, param, f"{scope}{MARK}")
        else:
            self._check_length(without_marks(text), max_tokens, param)
            ids = self._literal.encode(text)
        if add_special_tokens:
            before, after = self._added_around()
            ids = before + ids + after
        if len(ids) > max_tokens:
            raise context_length_exceeded(len(ids), max_tokens, param)
        return ids

    def _encode_marked_segment(self, text: str) -> list[int]:
        return self._literal.section(text, at_start=True) if MARK in text else self._encode_segment(text)

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer adds before and after a text."""
        plain, added = self.encode("a", add_special_tokens=False), self.encode("a")
        at = next(at for at in range(len(added)) if added[at : at + len(plain)] == plain)
        return added[:at], added[at + len(plain) :]

    def encode_cut(self, text: str, num_tokens: int, *, param: str = "prompt") -> list[int]:
        """Return the first `num_tokens` tokens of `text`, special ones included, without tokenizing much more of it.

        `param`: the request's field of the text.
        """
        _as_utf8(text)
        limit = max(0, num_tokens - self._backend.num_special_tokens_to_add(False))
        encoding, _ = self._beginning(text, limit, param)
        encoding.truncate(limit)
        ids: list[int] = post_process(self._backend, encoding, None).ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int, cut: int | None, *, param: str) -> Encoding:
        """Encode two texts as one prompt, joined by the tokenizer.

        `cut`: truncate the longer text so that both have that many tokens; `None`: raise 400 beyond `max_tokens` (0:
        not known). `param`: the request's field of the second text.
        """
        max_tokens = max_tokens or LARGEST_CONTEXT
        for text in (first, second):
            if cut is None:
                self._check_length(text, max_tokens, param)
            else:
                _as_utf8(text)
        limit = max(0, (max_tokens if cut is None else cut) - self._backend.num_special_tokens_to_add(True))
        if cut is None:
            encodings = encode_texts(self._backend, [first, second], add_special_tokens=False)
        else:
            begun = [self._beginning(text, limit, param) for text in (first, second)]
            encodings = [encoding for encoding, _ in begun]
            # If both texts exceed the limit, the one with more characters counts as the longer one.
            lengths = [
                len(encoding) if is_all else max(len(encoding), len(text))
                for (encoding, is_all), text in zip(begun, (first, second), strict=True)
            ]
            for encoding, length in zip(encodings, _lengths_within(limit, *lengths), strict=True):
                encoding.truncate(length)
        joined = post_process(self._backend, encodings[0], encodings[1])
        if cut is None and len(joined) > max_tokens:
            raise context_length_exceeded(len(joined), max_tokens, param)
        return joined

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Raise `PagemillError` 400 for a text that cannot fit, without tokenizing all of it."""
        raw = _as_utf8(text)
        check_size(raw, max_tokens, self._coverage, param, self._growth)
        # Few texts have more tokens than bytes: pieces are counted where all tokens of one would take much memory.
        if len(raw) > max(max_tokens / max(1.0, self._growth / NFC_GROWTH), SMALL_TEXT_BYTES):
            check_pieces(text, max_tokens, self._longest_entry_bytes, self._count, param)

    def _beginning(self, text: str, num_tokens: int, param: str) -> tuple[Encoding, bool]:
        """Return at least the first `num_tokens` tokens, without special ones, and whether they are all tokens."""
        encode = partial(self._encode, add_special_tokens=False)
        return encoded_beginning(text, num_tokens, self._longest_entry_bytes, encode, param, self._growth)

    def _encode_segment(self, text: str) -> list[int]:
        if self._words is not None and self._words.takes(text):
            return self._words.encode(text)
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return ids

    def _count(self, text: str) -> int:
        return len(self._encode(text, add_special_tokens=False))

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        return encode_texts(self._backend, [text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Return a new stream whose text continues `prompt_ids`."""
        return IncrementalDetokenizer(self._table, prompt_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of the token; those of a special token are its text."""
        return self._table[token_id]

    def has_token(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary."""
        return self._backend.token_to_id(text) is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which `decode` can leave out."""
        return self._table.special_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, as in log probabilities; U+FFFD for parts of a character."""
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
        """Render the prompt of a chat in limited time. Raises `PagemillError` 400 when messages and template do not
        fit.

        The text contains its own special tokens: encode it with `add_special_tokens=False`.
        """
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def warm_up(self) -> None:
        """Prepare the chat template."""
        self.chat_template.prepare()

    def close(self) -> None:
        """Stop the template process, if one runs. Also happens when the tokenizer is collected."""
        self.chat_template.close()


def _parsed(tokenizer_json: str) -> Any:
    if len(tokenizer_json) > MAX_JSON_BYTES:
        raise UnreadableModelError(
            f"the model's tokenizer cannot be used: its file has {len(tokenizer_json)} characters, more than "
            f"{MAX_JSON_BYTES}. Use a smaller vocabulary."
        )
    return orjson.loads(tokenizer_json)


def _lengths_within(limit: int, first: int, second: int) -> tuple[int, int]:
    """Return the lengths to which two texts are truncated to fit together: the longer one is truncated first."""
    if first + second <= limit:
        return first, second
    shorter = min(first, second, limit // 2)
    return (shorter, limit - shorter) if first <= second else (limit - shorter, shorter)


def _as_utf8(text: str) -> bytes:
    """Return the text in UTF-8. Raises `PagemillError` 400 for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(
            "prompt", f"The text has half a surrogate pair at character {error.start}; send valid Unicode."
        ) from None

"""A model's tokenizer for HTTP servers and output processing: encode, render a chat, decode, stream text.

It combines `encoding` (text to ids, in this process or in a limited one), `rules` (which of the two, and what a model's
file may ask for), `chat_template` (rendering) and `detokenizer` (decoding). Thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer as Backend

from pagemill_api.text.backend import loading
from pagemill_api.text.control_tokens import ControlTokenMarks
from pagemill_api.text.detokenizer import IncrementalDetokenizer
from pagemill_api.text.encoding.limited_encoder import LimitedEncoder
from pagemill_api.text.encoding.local_encoder import EncodedPair, LocalEncoder
from pagemill_api.text.rules import tokenizer_json
from pagemill_api.text.rules.tokenizer_rules import check_rules
from pagemill_api.text.segments import check_added_tokens
from pagemill_api.text.template.chat_template import ChatTemplate
from pagemill_api.text.token_bytes import TokenBytes
from pagemill_protocol.source_errors import UnreadableModelError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle


class EncodeWithin(Protocol):
    """Encodes as `Tokenizer.encode`, a text of any size: raises 400 beyond `max_tokens`, without tokenizing all of it.

    `max_tokens` 0: not known. `param`: the request's field of the text. `scope`: segments are cached for texts of the
    same scope; `None`: no caching. `shielded`: marked control tokens in the text are text (`control_tokens`).
    """

    def __call__(
        self,
        text: str,
        max_tokens: int,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        scope: str | None = None,
        shielded: bool = False,
    ) -> list[int]: ...


class Tokenizer:
    """A model's tokenizer. `chat_template` overrides the bundle's. Raises `SourceError` for an unusable bundle."""

    def __init__(self, bundle: TokenizerBundle, chat_template: str | None = None) -> None:
        self.bundle = bundle
        self._encoder: LocalEncoder | LimitedEncoder
        with loading():
            parsed = tokenizer_json.parse(bundle.tokenizer_json)
            rules = check_rules(parsed)
            check_added_tokens(parsed)
            self.control_tokens = ControlTokenMarks(parsed)
            if rules.unknown:
                self._encoder = LimitedEncoder(bundle.tokenizer_json, rules.unknown)
                self._vocabulary = _vocabulary(parsed)
            else:
                self._encoder = LocalEncoder(bundle.tokenizer_json, parsed, self.control_tokens, rules)
                self._vocabulary = self._encoder.backend
            self._table = TokenBytes(self._vocabulary, parsed)
        self.encode_within: EncodeWithin = self._encoder.encode_within
        """Without a method in between: a text of known segments takes few microseconds."""
        self.limited_because = rules.unknown
        """The step without a known bound, for which texts are encoded in a limited process; empty: they are not."""
        self.eos_token_ids = list(bundle.eos_token_ids)
        self.vocab_size = max(bundle.vocab_size, self._vocabulary.get_vocab_size())
        """Number of rows of the logits."""
        self.chat_template = ChatTemplate(bundle, override=chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it become their ids. Raises 400 for lone
        surrogates."""
        return self._encoder.encode(text, add_special_tokens)

    def encode_cut(self, text: str, num_tokens: int, *, param: str = "prompt") -> list[int]:
        """Return the first `num_tokens` tokens of `text`, special ones included, without tokenizing much more of it.

        `param`: the request's field of the text.
        """
        return self._encoder.encode_cut(text, num_tokens, param=param)

    def encode_pair(self, first: str, second: str, max_tokens: int, cut: int | None, *, param: str) -> EncodedPair:
        """Encode two texts as one prompt, joined by the tokenizer.

        `cut`: truncate the longer text so that both have that many tokens; `None`: raise 400 beyond `max_tokens` (0:
        not known). `param`: the request's field of the second text.
        """
        return self._encoder.encode_pair(first, second, max_tokens, cut, param=param)

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
        return self._vocabulary.token_to_id(text) is not None

    def marks(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the end of each special token in `text`, and the number of tokens up to it, if texts are encoded by
        segments."""
        segments = self._encoder.segments if isinstance(self._encoder, LocalEncoder) else None
        return [] if segments is None else segments.marks(text, token_ids)

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

    def check_limits(self) -> None:
        """Raise `UnreadableModelError` for a limited tokenizer that cannot encode plain text within its limits."""
        if isinstance(self._encoder, LimitedEncoder):
            self._encoder.check()

    def warm_up(self) -> None:
        """Prepare the chat template, and the process of a limited tokenizer."""
        self.chat_template.prepare()
        if isinstance(self._encoder, LimitedEncoder):
            with contextlib.suppress(UnreadableModelError):  # the first text fails in the same way
                self._encoder.prepare()

    def close(self) -> None:
        """Stop the processes that run. Also happens when the tokenizer is collected."""
        self.chat_template.close()
        self._encoder.close()


def _vocabulary(parsed: dict[str, Any]) -> Backend:
    """Return the tokenizer without the steps that texts go through: it knows its tokens."""
    parts = {"version": "1.0", "model": parsed["model"], "added_tokens": parsed.get("added_tokens") or []}
    return Backend.from_str(orjson.dumps(parts).decode())

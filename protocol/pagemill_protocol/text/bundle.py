"""TokenizerBundle: everything that turns text into token ids and back, as one content-addressed value.

Written by engines, which have the model's files, and cached by gateways by `digest`. It has no behaviour: `tokenizer`
encodes, decodes and renders with it. `load_bundle` builds it from a model's files.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pagemill_protocol.errors import PagemillError
from pagemill_protocol.pooling import PoolingSpec

END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
)
"""Control tokens that end a turn or a document wherever they exist, whatever the metadata lists."""


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    tokenizer_json: str
    """The `tokenizers` library's own format."""
    chat_template: str | None = None
    """Jinja source; `None`: a base model, no chat."""
    tool_chat_template: str | None = None
    """Used instead of `chat_template` when a request has tools."""
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    """Tokens that end generation, the model's own end-of-sequence first."""
    add_bos_token: bool = False
    """Encoding with special tokens starts with `bos_token`."""
    special_tokens: dict[str, str] = {}
    """Further named tokens that templates may use, for example `pad_token`."""
    vocab_size: int = 0
    """Rows of the logits; at least the number of tokens, often padded."""
    pooling: PoolingSpec | None = None
    """What the model makes of prompts in place of text; in what an engine hands out."""
    sampling_defaults: dict[str, Any] = {}
    """By name of `SamplingParams`, for requests that send none: as the model's folder has them, and as an engine
    resolved them (`generation_defaults`) in what it hands out."""

    @property
    def digest(self) -> str:
        """blake2b-256 over the content, hex: equal bundles have equal digests, in any process."""
        return bundle_digest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """msgpack, byte for byte the same for equal content."""
        return _encoder.encode(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> TokenizerBundle:
        try:
            return _decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise PagemillError(
                f"Not a tokenizer bundle: {error}", status=502, type="server_error", code="bad_bundle"
            ) from None


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder: msgspec.msgpack.Decoder[TokenizerBundle] = msgspec.msgpack.Decoder(TokenizerBundle)


def bundle_digest(raw: bytes) -> str:
    """The digest of a serialized bundle.

    Receivers check this: a bundle of a newer version that is decoded and encoded again would lose its new fields.
    """
    return hashlib.blake2b(raw, digest_size=32).hexdigest()


def eos_ids(declared: list[int | None], control_ids: dict[str, int]) -> list[int]:
    """`declared` ids in order, then every token of `END_TOKENS` among the control tokens; no duplicates.

    Where answers have channels (harmony), `<|end|>` ends one message of several.
    """
    ends = [token for token in END_TOKENS if token != "<|end|>" or "<|channel|>" not in control_ids]
    known = [control_ids[token] for token in ends if token in control_ids]
    return list(dict.fromkeys(token_id for token_id in [*declared, *known] if token_id is not None and token_id >= 0))

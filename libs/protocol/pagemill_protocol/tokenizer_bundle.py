"""TokenizerBundle: everything that turns text into token ids and back, as one content-addressed value.

Engines, which have the model's files, make it; gateways cache it by `digest`. It has no behaviour: `tokenizer` encodes,
decodes and renders with it. `load_bundle` builds it from a model's files.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.pooling import PoolingSpec

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
"""Control tokens that end a turn or a document in any model that has them, whatever its metadata lists."""


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    tokenizer_json: str
    """JSON in the format of the `tokenizers` library."""
    chat_template: str | None = None
    """Jinja source; `None`: a base model without chats."""
    tool_chat_template: str | None = None
    """Used instead of `chat_template` when a request has tools."""
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    """Tokens that end generation, the model's own end-of-sequence token first."""
    add_bos_token: bool = False
    """Whether encoding with special tokens starts with `bos_token`."""
    special_tokens: dict[str, str] = {}
    """Further named tokens that templates may use, for example `pad_token`."""
    vocab_size: int = 0
    """Number of rows of the logits: at least the number of tokens, often padded."""
    pooling: PoolingSpec | None = None
    """The model's pooling, if it returns no text; set in the bundle that an engine serves."""
    has_states: bool = False
    """Whether the model has recurrent layers, so that requests name `reuse_points`."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling values by name of `SamplingParams` for requests that send none: those of the model's folder, or in the
    bundle that an engine serves, the resolved ones (`generation_defaults`)."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    """In the bundle that an engine serves, its settings, as are the templates: gateways that have none use them."""

    @property
    def digest(self) -> str:
        """Hex blake2b-256 of the content: equal bundles have equal digests in any process."""
        return bundle_digest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return msgpack that is byte for byte the same for equal content."""
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
    """Return the digest of a serialized bundle.

    Receivers check it on the bytes: decoding and encoding a bundle of a newer version would lose its new fields.
    """
    return hashlib.blake2b(raw, digest_size=32).hexdigest()


def eos_ids(declared: list[int | None], control_ids: dict[str, int]) -> list[int]:
    """Return the `declared` ids in order, then all control tokens of `END_TOKENS`, without duplicates.

    Where answers have channels (harmony), `<|end|>` ends only one of several messages.
    """
    ends = [token for token in END_TOKENS if token != "<|end|>" or "<|channel|>" not in control_ids]
    known = [control_ids[token] for token in ends if token in control_ids]
    return list(dict.fromkeys(token_id for token_id in [*declared, *known] if token_id is not None and token_id >= 0))

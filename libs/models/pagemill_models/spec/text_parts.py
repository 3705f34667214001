"""The text part of a multimodal model: the values of `text_config`, under the class's own defaults.

Encoders are not read. Text has the same position on all axes of a multimodal rotary embedding (mRoPE), which then
equals the plain one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.known import MULTIMODAL

_TIED = "tie_word_embeddings"
_ROPE_TYPES = ("rope_type", "type")


class TextPart(NamedTuple):
    architecture: str
    """Name of the whole model."""
    model_type: str
    """That of its text part."""
    values: dict[str, Any]


def text_part(architectures: list[str], values: dict[str, Any]) -> TextPart | None:
    """Return the text part of a multimodal model. `values`: of its config.json; old ones have no `text_config`."""
    name = next((each for each in architectures if each in MULTIMODAL), None)
    if name is None:
        return None
    own = values.get("text_config")
    text = dict(own) if isinstance(own, dict) else {key: each for key, each in values.items() if key != "text_config"}
    found = text.get("model_type")
    model_type = found if isinstance(found, str) and isinstance(own, dict) else MULTIMODAL[name].text_type
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            text[key] = _of_text(text[key])
    ties = (values.get(_TIED), text.get(_TIED))
    text[_TIED] = True in ties or (MULTIMODAL[name].tied and ties[0] is None)
    return TextPart(name, model_type, text)


def with_stored_head(decoder: DecoderSpec, names: Collection[str]) -> DecoderSpec:
    """Return the decoder with the head that the files hold, whatever they say about the embedding.

    `names`: the declared names of the stored tensors.
    """
    head = decoder.head
    if not decoder.text_only or head is None or f"{head.name}.weight" not in names:
        return decoder
    return msgspec.structs.replace(decoder, head=msgspec.structs.replace(head, tied=False))


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    return {key: "default" if key in _ROPE_TYPES and each == "mrope" else each for key, each in rope.items()}

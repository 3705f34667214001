"""The context length of a model whose rotary embedding is scaled. Which scalings exist is `rope_scaling`'s part."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.limits import check_size
from pagemill_models.declaration.rope_scaling import scaled_context


def with_scaled_context(decoder: DecoderSpec, path: Path) -> DecoderSpec:
    """Return `decoder` with the context length that its rotary embedding is scaled to. Raises `UnreadableModelError`.

    Where kinds of layers differ in theirs, as in Gemma 3, the file declares the scaled length. `path` names the file.
    """
    ropes = decoder.ropes()
    if len(ropes) != 1:
        return decoder
    name = "max_position_embeddings"
    context = check_size(path, name, scaled_context(ropes[0].scaling, decoder.max_position_embeddings))
    return msgspec.structs.replace(decoder, max_position_embeddings=context)

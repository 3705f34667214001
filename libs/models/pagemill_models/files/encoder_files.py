"""Tensors of a multimodal model's encoders, by their names, and the weight files that hold nothing else.

Only the text of such models is served: these files are neither fetched nor read, and may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIX = "model."
_ENCODERS = frozenset(
    {
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "multi_modal_projector",
        "vision_embedder",
        "vision_model",
        "vision_tower",
        "visual",
    }
)


def is_of_encoder(name: str) -> bool:
    """Whether a tensor belongs to an encoder, or to the projection of its results."""
    return name.removeprefix(_PREFIX).partition(".")[0] in _ENCODERS


def needed_files(weight_map: Mapping[str, str]) -> set[str]:
    """Return the files of an index, which gives each tensor's, without those that hold encoders only."""
    return {file for name, file in weight_map.items() if not is_of_encoder(name)}

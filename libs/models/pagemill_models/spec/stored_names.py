"""Which stored tensor each declared tensor is: prefixes that files add or leave out, and tensors of encoders."""

from __future__ import annotations

from collections.abc import Iterable

from pagemill_models.declaration.declaration import DecoderSpec

_DECLARED = "model."
_PREFIXES = ("model.language_model.", "language_model.model.", _DECLARED)
"""Prefixes of a text part's tensors, of which a file has one."""
_OLD = {"gamma": "weight", "beta": "bias"}
_MIXTRAL = ".block_sparse_moe."
_OF_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
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


def declared_names(stored: Iterable[str], decoder: DecoderSpec) -> dict[str, str]:
    """Return the stored name of each declared name; a name that is not declared is returned for itself."""
    of_mixtral = any(_MIXTRAL in name for mixture in decoder.mixtures() for name in mixture.gate_names())
    current = {_of_mixtral(_current(name)) if of_mixtral else _current(name): name for name in stored}
    return {declared: current[name] for declared, name in _prefixed(list(current), decoder).items()}


def _current(name: str) -> str:
    """Return the name of a norm's tensor for that of files before 2019, which transformers renames, too."""
    owner, _, part = name.rpartition(".")
    return f"{owner}.{_OLD[part]}" if part in _OLD and owner.endswith("LayerNorm") else name


def _of_mixtral(name: str) -> str:
    """Return Mixtral's name for that of a file whose experts have the names of transformers 5's modules."""
    if ".mlp.gate." not in name and ".mlp.experts." not in name:
        return name
    owner, _, part = name.replace(".mlp.", _MIXTRAL).rpartition(".")
    base, _, matrix = owner.rpartition(".")
    return f"{base}.{_OF_EXPERT.get(matrix, matrix)}.{part}"


def _prefixed(stored: list[str], decoder: DecoderSpec) -> dict[str, str]:
    if decoder.text_only:
        prefix = _prefix(stored, decoder)
        return {_text_name(name, prefix): name for name in stored if not is_of_encoder(name)}
    prefix = decoder.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in stored):
        return {name: name for name in stored}
    declared = decoder.shapes()
    return {name if name in declared or decoder.is_ignored(name) else prefix + name: name for name in stored}


def is_of_encoder(name: str) -> bool:
    """Whether a tensor of a multimodal model belongs to an encoder, or to the projection of its results."""
    return name.removeprefix(_DECLARED).partition(".")[0] in _ENCODERS


def _prefix(stored: list[str], decoder: DecoderSpec) -> str:
    """Return the prefix before the embedding; a file without one of them lacks declared tensors."""
    embedding = decoder.embedding.name.removeprefix(_DECLARED) + "."
    return next((each for each in _PREFIXES if any(name.startswith(each + embedding) for name in stored)), _DECLARED)


def _text_name(name: str, prefix: str) -> str:
    if name.startswith(prefix):
        return _DECLARED + name.removeprefix(prefix)
    of_head = name.removeprefix("model.").removeprefix("language_model.")
    return of_head if of_head.startswith("lm_head.") else name

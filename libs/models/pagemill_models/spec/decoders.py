"""Return the declaration for a config.json, by its family.

Of a multimodal model it is that of the text part: the values of `text_config`, under the class's own defaults. Encoders
are not read. Text has the same position on all axes of a multimodal rotary embedding (mRoPE), which then equals the
plain one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import ClassifierSpec, DecoderSpec, DenseSpec, LinearSpec, MatrixSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture, contradictions
from pagemill_models.declaration.known import BUILT_IN, GROUP, MULTIMODAL, OTHER_CLASSES, RECURRENT, unsupported
from pagemill_models.declaration.limits import Held
from pagemill_models.declaration.registry import FoundFamily, find_family, find_text_family
from pagemill_models.files.regular_file import MODULES_FILE
from pagemill_models.spec import by_transformers
from pagemill_models.spec.by_transformers import class_is_installed, recurrent_key
from pagemill_models.spec.contexts import with_scaled_context
from pagemill_protocol.source_errors import UnreadableModelError

CLASSIFIER = "ForSequenceClassification"
_TIED = "tie_word_embeddings"
_ROPE_TYPES = ("rope_type", "type")


def decoder_from_config(values: dict[str, Any], path: Path, held: Held | None = None) -> DecoderSpec:
    """Return the declaration. Raises `SourceError`.

    `values`: the contents of `path`, a config.json. `held`: what the files hold, where their headers are known.
    """
    names = architectures_of(values)
    part = text_part(names, values)
    if part is None:
        found = _find_family(names, values, path)
    else:
        found = find_text_family(part.architecture, part.model_type, path.parent)
    own = values if part is None else part.values
    defaults = _class_defaults().get(found.model_type or "", {})
    config = ConfigValues(path, own, found.architecture, held, defaults)
    with contradictions(path):
        decoder = _with_stacked(with_scaled_context(found.family.read_config(config), path))
    if decoder.is_causal and not config.flag("is_causal", True):
        raise config.unsupported("attention to later tokens (`is_causal`)")
    decoder = decoder if part is None else msgspec.structs.replace(decoder, text_only=True)
    if decoder.head is None or not (_is_headless(names, found) or _pools(names, path.parent)):
        if decoder.head is not None and not decoder.is_causal:
            raise config.unsupported("text from attention to later tokens (`use_bidirectional_attention`)")
        return decoder
    if decoder.by_transformers:
        raise config.unsupported("pooling in place of a head (by its class in transformers)")
    return _without_head(decoder, config.num_labels if config.is_classifier else None)


def _with_stacked(decoder: DecoderSpec) -> DecoderSpec:
    """Return the decoder with the names of all experts' matrices in one tensor, as transformers 5's modules have it."""
    first = next(decoder.mixtures(), None)
    if decoder.stacked or first is None or not first.experts[0].gated:
        return decoder
    parts = [part.name.rpartition(".experts.0.")[2] for each in first.experts[0].linears() for part in each.parts]
    of_each = [f".experts.*.{part}.weight" for part in parts]
    return msgspec.structs.replace(
        decoder, stacked={".experts.gate_up_proj": tuple(of_each[:-1]), ".experts.down_proj": (of_each[-1],)}
    )


@cache
def _class_defaults() -> dict[str, Mapping[str, Any]]:
    """Return, by `model_type`, the values that transformers' classes give to keys that a file lacks.

    `tests/shared/class_defaults.py` generates the file from transformers; a test compares both.
    """
    found: dict[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("class_defaults.json").read_bytes())
    return found


def architectures_of(values: dict[str, Any]) -> list[str]:
    declared = values.get("architectures")
    return [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []


def _is_headless(names: list[str], found: FoundFamily) -> bool:
    """Whether the files name a family's class without its head, such as `Qwen3Model` or `Gemma3TextModel`, and not an
    old spelling of it."""
    spellings = {spelling for known in BUILT_IN.values() for spelling in known.architectures}
    base = found.architecture.partition("For")[0]
    return any(name in names and name not in spellings for name in (f"{base}Model", f"{base}TextModel"))


def _find_family(architectures: list[str], values: dict[str, Any], path: Path) -> FoundFamily:
    model_type, names = values.get("model_type"), list(architectures)
    may_be_headless = any(name.endswith((CLASSIFIER, "Model")) for name in names)
    if isinstance(model_type, str) and (may_be_headless or not names):
        names.append(model_type)
    if not names:
        raise UnreadableModelError(f"`{path}` names neither `architectures` nor `model_type`.")
    try:
        return find_family(names, path.parent)
    except UnsupportedModelArchitecture as error:
        key = recurrent_key(values)
        if key is not None:
            raise unsupported(names[0], path.parent, f" with {RECURRENT} (`{key}`)") from error
        if names[0] in OTHER_CLASSES:
            raise UnsupportedModelArchitecture(f"{error.message} {OTHER_CLASSES[names[0]]}") from None
        if class_is_installed(model_type, names[0] if "auto_map" in values else None):
            return FoundFamily(names[0], by_transformers.FAMILY)
        if "auto_map" not in values:
            raise
        raise UnsupportedModelArchitecture(
            f"{error.message} Its `auto_map` names code in the model's own files, which is never run; a package that "
            f"you install may add the architecture (entry points `{GROUP}`)."
        ) from None


def _pools(architectures: list[str], folder: Path) -> bool:
    """Whether the folder's model returns vectors or scores of texts, although its family may generate."""
    return any(name.endswith(CLASSIFIER) for name in architectures) or (folder / MODULES_FILE).is_file()


def _without_head(decoder: DecoderSpec, num_labels: int | None) -> DecoderSpec:
    """Return a decoder that is pooled. `num_labels`: labels of its classifier, if it has one."""
    classifier = None
    if num_labels is not None:
        labels = LinearSpec(decoder.hidden_size, (MatrixSpec(name="score", rows=num_labels),))
        classifier = ClassifierSpec((DenseSpec(linear=labels),), "last")
    head = () if decoder.head is None else (f"{decoder.head.name}.weight", f"{decoder.head.name}.bias")
    return msgspec.structs.replace(
        decoder,
        head=None,
        classifier=classifier,
        ignored=(*decoder.ignored, *head),
        optional_prefix=decoder.optional_prefix or decoder.embedding.name.partition(".")[0] + ".",
    )


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


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    return {key: "default" if key in _ROPE_TYPES and each == "mrope" else each for key, each in rope.items()}

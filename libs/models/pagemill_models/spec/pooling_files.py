"""Read how a model pools from its folder: the files of sentence-transformers. `pooled` decides whether it pools.

`modules.json` lists the modules that sentence-transformers runs in order (a transformer, a pooling, optionally a
normalization); folders without it are pooled by that library's default: the mean of the tokens. Classifiers are read
from `config.json` alone. `pagemill_protocol.request.pooling` defines the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from pagemill_models.declaration.declaration import ClassifierSpec, DecoderSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.files.json_file import read_optional, read_text
from pagemill_models.files.regular_file import exists, path_inside
from pagemill_models.spec.pooled import MODULES_FILE
from pagemill_protocol.request.pooling import PoolingMethod, PoolingSpec
from pagemill_protocol.source_errors import UnreadableModelError

_METHODS: dict[str, PoolingMethod] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Values of `pooling_mode`, and the flags that older files have in its place."""
_LIMIT = "max_seq_length"


def read_pooling(folder: Path, values: dict[str, Any], decoder: DecoderSpec) -> PoolingSpec:
    """Return the pooling of a model without a head. Raises `SourceError` for unsupported pooling."""
    whole = not decoder.is_causal
    if decoder.classifier is not None:
        return _scores(folder, values, decoder.classifier, whole)
    modules = _modules(folder)
    settings = read_optional(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    prompts = {name: text for name, text in (prompts or {}).items() if isinstance(text, str)}
    return PoolingSpec(
        task="embed",
        method=_method(folder, modules),
        size=decoder.hidden_size,
        whole_prompts=whole,
        normalized="Normalize" in modules,
        dimensions=_dimensions(folder, values),
        prompts=prompts,
        default_prompt=prompts.get(str(settings.get("default_prompt_name")), ""),
        lower_case=read_optional(folder / "sentence_bert_config.json").get("do_lower_case") is True,
    )


def most_tokens(folder: Path, decoder: DecoderSpec) -> int:
    """Return the maximum tokens of a text: those of the model's positions, or a smaller limit of its folder."""
    limit, most = read_optional(folder / "sentence_bert_config.json").get(_LIMIT), decoder.max_position_embeddings
    return min(most, limit) if type(limit) is int and limit > 0 else most


def _scores(folder: Path, values: dict[str, Any], classifier: ClassifierSpec, whole: bool) -> PoolingSpec:
    if classifier.num_labels != 1:
        raise UnsupportedModelArchitecture(
            f"`{folder}` is a classifier of {classifier.num_labels} labels; only those of one label are supported, "
            "which score pairs of texts. Use a cross-encoder for reranking."
        )
    return PoolingSpec(
        task="score",
        method=classifier.pooling,
        size=1,
        whole_prompts=whole,
        sigmoid=_has_sigmoid(folder, values),
    )


def _has_sigmoid(folder: Path, values: dict[str, Any]) -> bool:
    """Whether scores pass a sigmoid, as in sentence-transformers' CrossEncoder; the default of files without a
    setting."""
    own = values.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or values.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise UnsupportedModelArchitecture(
            f"`{folder}`: its scores pass `{name}` (config.json), which is not supported; Sigmoid and Identity are."
        )
    return kind == "Sigmoid"


def _modules(folder: Path) -> dict[str, str]:
    """Return the modules' folders by the last part of their types, in order."""
    path = folder / MODULES_FILE
    if not exists(path):
        return {"Transformer": "", "Pooling": "1_Pooling"}
    try:
        entries = orjson.loads(read_text(path))
        found = {str(entry["type"]).rpartition(".")[2]: str(entry.get("path", "")) for entry in entries}
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
        raise UnreadableModelError(f"`{path}` is not a list of modules with their types.") from None
    others = found.keys() - {"Transformer", "Pooling", "Normalize"}
    if others or found.get("Transformer"):
        what = f"the module `{min(others)}`" if others else f"its weights in `{found['Transformer']}`"
        raise UnsupportedModelArchitecture(
            f"`{folder}` has {what} ({MODULES_FILE}), which is not supported; Transformer (in the folder itself), "
            "Pooling and Normalize are."
        )
    return found


def _method(folder: Path, modules: dict[str, str]) -> PoolingMethod:
    path = path_inside(folder, modules.get("Pooling", "1_Pooling"), MODULES_FILE) / "config.json"
    values = read_optional(path, folder)
    if not values:
        return "mean"
    if values.get("include_prompt") is False:
        raise UnsupportedModelArchitecture(f"`{path}` leaves prompts out of the pooling, which is not supported.")
    mode = values.get("pooling_mode")
    if isinstance(mode, str):
        modes = [mode]
    else:
        modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _METHODS:
        raise UnsupportedModelArchitecture(
            f"`{path}` pools by {', '.join(modes) or 'nothing'}; exactly one of cls, mean and lasttoken is supported."
        )
    return _METHODS[modes[0]]


def _dimensions(folder: Path, values: dict[str, Any]) -> list[int] | None:
    """Return the sizes of Matryoshka representations, read as in vLLM: empty for any size, None for none."""
    sizes = values.get("matryoshka_dimensions")
    if sizes is None:
        return [] if values.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise UnreadableModelError(f"`{folder / 'config.json'}`: `matryoshka_dimensions` must be a list of sizes.")
    return sorted(sizes)

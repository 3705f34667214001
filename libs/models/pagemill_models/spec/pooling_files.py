"""Read how a model pools from its folder: the files of sentence-transformers. `decoders` decides whether it pools.

Here are the settings of the whole model; `sentence_modules` reads what follows the transformer. Every key is honoured
or refused by its name. Classifiers are read from `config.json`. `pagemill_protocol.request.pooling` defines the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.files.json_file import read_optional
from pagemill_models.spec.sentence_modules import PoolingModules, check_keys
from pagemill_protocol.request.pooling import PoolingMethod, PoolingSpec, Similarity
from pagemill_protocol.source_errors import UnreadableModelError

_WHOLE, _TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
_LIMIT = "max_seq_length"
_ARGUMENTS = ("model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs", "config_kwargs")
"""Arguments of transformers' classes."""
_WITHOUT_EFFECT = (
    "add_pooling_layer",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "trust_remote_code",
    "unpad_inputs",
    "use_memory_efficient_attention",
)
_TEXT_ONLY: dict[str, tuple[Any, ...]] = {
    "transformer_task": (None, "feature-extraction"),
    "modality_config": (None, {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}),
    "module_output_name": (None, "token_embeddings"),
    "processing_kwargs": (None, {}),
    "unpad_inputs": (None, True, False),
    **dict.fromkeys(("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"), (None,)),
}


def read_pooling(
    folder: Path, values: dict[str, Any], decoder: DecoderSpec, modules: PoolingModules | None
) -> PoolingSpec:
    """Return the pooling of a model without a head. Raises `SourceError` for unsupported pooling.

    `decoder`: with the classifier or the dense layers behind the pooling. `modules`: None for a classifier.
    """
    whole, after = not decoder.is_causal, decoder.classifier
    if after is not None and after.pooling is not None:
        return _scores(folder, values, after.num_labels, after.pooling, whole)
    assert modules is not None, "only classifiers have none"
    settings = _settings(folder)
    prompts = {name: text for name, text in (settings.get("prompts") or {}).items() if isinstance(text, str)}
    size = decoder.hidden_size if after is None else after.num_labels
    default = settings.get("truncate_dim")
    return PoolingSpec(
        task="embed",
        method=modules.method,
        size=size,
        whole_prompts=whole,
        normalized=modules.normalized,
        dimensions=_dimensions(folder, values),
        default_dimensions=default if default is None or default < size else None,
        prompts=prompts,
        default_prompt=prompts.get(str(settings.get("default_prompt_name")), ""),
        lower_case=read_optional(folder / _TRANSFORMER).get("do_lower_case") is True,
        similarity=settings.get("similarity_fn_name") or "cosine",
    )


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the whole model, whose keys are known. Raises `SourceError`."""
    path = folder / _WHOLE
    settings, limits = read_optional(path), read_optional(folder / _TRANSFORMER)
    read = ("__version__", "requirements", "prompts", "default_prompt_name", "truncate_dim")
    kinds = {"model_type": (None, "SentenceTransformer"), "similarity_fn_name": (None, *get_args(Similarity))}
    check_keys(path, settings, read, kinds)
    check_keys(folder / _TRANSFORMER, limits, (_LIMIT, "do_lower_case", *_ARGUMENTS), _TEXT_ONLY)
    for key in _ARGUMENTS:
        found = limits.get(key) or {}
        check_keys(folder / _TRANSFORMER, found if isinstance(found, dict) else {key: found}, _WITHOUT_EFFECT, {})
    prompts, name, size = (
        settings.get("prompts") or {},
        settings.get("default_prompt_name"),
        settings.get("truncate_dim"),
    )
    if not isinstance(prompts, dict) or (name is not None and not isinstance(prompts.get(name), str)):
        raise UnreadableModelError(
            f"`{path}`: `default_prompt_name` is {name!r}, and `prompts` has no text of that name."
        )
    if size is not None and (type(size) is not int or size < 1):
        raise UnreadableModelError(f"`{path}`: `truncate_dim` is {size!r}; it must be a positive integer.")
    return settings


def most_tokens(folder: Path, decoder: DecoderSpec) -> int:
    """Return the maximum tokens of a text: those of the model's positions, or a smaller limit of its folder."""
    limit, most = read_optional(folder / _TRANSFORMER).get(_LIMIT), decoder.max_position_embeddings
    return min(most, limit) if type(limit) is int and limit > 0 else most


def _scores(folder: Path, values: dict[str, Any], num_labels: int, method: PoolingMethod, whole: bool) -> PoolingSpec:
    if num_labels != 1:
        raise UnsupportedModelArchitecture(
            f"`{folder}` is a classifier of {num_labels} labels; only those of one label are supported, "
            "which score pairs of texts. Use a cross-encoder for reranking."
        )
    return PoolingSpec(
        task="score",
        method=method,
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


def _dimensions(folder: Path, values: dict[str, Any]) -> list[int] | None:
    """Return the sizes of Matryoshka representations, read as in vLLM: empty for any size, None for none."""
    sizes = values.get("matryoshka_dimensions")
    if sizes is None:
        return [] if values.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise UnreadableModelError(f"`{folder / 'config.json'}`: `matryoshka_dimensions` must be a list of sizes.")
    return sorted(sizes)

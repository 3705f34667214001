"""Finds what drafts tokens, a model or a head, and decides whether it fits the model that verifies them, before either
is loaded.

It computes the same tokens, keeps their keys and values in blocks of the same numbers, and so shares every prefix hit.
`starting` loads it, `runners.drafter` and, on a GPU, `runners.device.device_drafter` run it.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagemill_execution.config import ExecutionConfig, SpeculationConfig
from pagemill_execution.decoders.errors import WeightsError
from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.sizing.compute import Compute, choose_compute
from pagemill_execution.weights.declared import DeclaredWeights
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import open_weights, shape_only_weights
from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_models.files.safetensors_header import lacks_weights
from pagemill_models.sources import resolve_source
from pagemill_models.spec.heads import D2T, eagle3_head, mtp_heads, stored_of
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_models.tokenizer_files.load_bundle import load_bundle

logger = logging.getLogger(__name__)

_NOT_RUN = "Set method to ngram."
_FIXED = "on a GPU no memory moves between keys and values and states beside it"
_ON_FIRST = "one of several GPUs would hold it whole, which leaves all of them less room for keys and values"


class DraftModel(NamedTuple):
    config: ExecutionConfig
    """The settings with which it is loaded."""
    path: Path
    spec: ModelSpec
    compute: Compute
    token_ids: NDArray[np.int64] | None = None
    """The tokens of a head's own vocabulary, in the model's; None: it uses the model's head."""
    further: tuple[DraftModel, ...] = ()
    """The model's own layers that draft behind the first one."""

    @property
    def asks_target(self) -> bool:
        """Whether it is a head without an embedding or logits of its own."""
        return self.spec.decoder.reads is not None and not (self.spec.decoder.embeds and self.token_ids is not None)


def find_draft(config: ExecutionConfig, path: Path, spec: ModelSpec) -> DraftModel | None:
    """Return what drafts by the settings, or None if nothing does. `path`, `spec`: the model that verifies.

    With `auto` the model's own layer drafts, where it has one that can be used, on GPUs unless `is_left_out`.
    Raises `LoadError` and `SourceError`, which name the setting and the remedy.
    """
    settings = config.speculative
    if settings.method == "auto":
        try:
            found = _find(config, path, spec)
        except LoadError:
            return None
        if found is None or found.compute.backend != "triton" or not is_left_out(config, spec):
            return found
        why = _FIXED if spec.has_states else _ON_FIRST
        logger.info(
            "`%s` has a layer that drafts tokens, which is not used: %s. Set speculative.method to mtp to use it.",
            path, why,
        )  # fmt: skip
        return None
    return _find(config, path, spec) if settings.method in ("draft", "eagle3", "mtp") else None


def is_left_out(config: ExecutionConfig, spec: ModelSpec) -> bool:
    """Whether the model's own layer drafts on GPUs only where a setting says so."""
    return config.speculative.method == "auto" and (config.num_ranks > 1 or spec.has_states)


def _find(config: ExecutionConfig, path: Path, spec: ModelSpec) -> DraftModel | None:
    settings = config.speculative
    if spec.pooling is not None:
        raise _refused(f"`{spec.architecture}` generates no text, so nothing can be drafted for it. Remove it.")
    if config.pipeline_parallel_size > 1:
        raise _refused(
            f"what drafts computes in no stages, and method {settings.method} drafts. Set pipelineParallel to 1, or "
            "method to ngram."
        )
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    if all(window is not None and window < longest for window in spec.decoder.windows()):
        raise _refused(f"`{spec.architecture}` keeps no whole text, but a window of it. {_NOT_RUN}")
    if settings.source is None:
        return _own_head(config, path, spec)
    draft_path = resolve_source(settings.source, field="speculative.source")
    if settings.method == "eagle3":
        return _eagle3(config, draft_path, spec, longest)
    draft_spec = load_model_spec(draft_path)
    if draft_spec.pooling is not None or draft_spec.decoder.head is None:
        raise _refused(f"`{settings.source}` generates no text. Name a model that does.")
    if draft_spec.has_states:
        raise _refused(
            f"`{settings.source}` keeps recurrent states, which no draft model may have. Name a model without "
            "recurrent layers."
        )
    _check_vocabulary(settings.source, path, spec, draft_path, draft_spec)
    _check_context(settings.source, draft_spec, longest)
    alone = _alone(config, model=settings.source, quantization="none")
    return DraftModel(alone, draft_path, draft_spec, choose_compute(alone, draft_spec))


def _check_context(source: str | None, draft_spec: ModelSpec, longest: int) -> None:
    if draft_spec.max_position_embeddings < longest:
        raise _refused(
            f"`{source}` was made for {draft_spec.max_position_embeddings} tokens, but requests may have {longest}. "
            "Lower maxModelLen, or name a draft model with a longer context."
        )


def _alone(config: ExecutionConfig, **changes: Any) -> ExecutionConfig:
    """Return the settings of what drafts, whose results need not be exact."""
    off = SpeculationConfig(method="off")
    changes = {"model_folder": None, "deterministic": False, "enable_lora": False, "speculative": off, **changes}
    return msgspec.structs.replace(config, **changes)


def _own_head(config: ExecutionConfig, path: Path, spec: ModelSpec) -> DraftModel | None:
    """Return the model's own layers that draft; None with `auto` if it declares none. Files may have fewer of them
    than they declare; a GPU runs the first."""
    heads = mtp_heads(spec)
    if not heads:
        if config.speculative.method == "auto":
            return None
        raise _refused(f"`{spec.architecture}` declares no layer that drafts (`num_nextn_predict_layers`). {_NOT_RUN}")
    alone = _alone(config, model_folder=config.model_folder, kv_cache_dtype="auto")
    first, *others = (_head(alone, path, each, None) for each in stored_of(heads, path))
    return first if first.compute.backend == "triton" else first._replace(further=tuple(others))


def _eagle3(config: ExecutionConfig, head_path: Path, spec: ModelSpec, longest: int) -> DraftModel:
    source, settings = config.speculative.source, config.speculative
    head = eagle3_head(head_path)
    reads = head.decoder.reads
    assert source is not None
    assert reads is not None
    assert reads.states is not None
    if spec.decoder.by_transformers:
        raise _refused(f"`{spec.architecture}` runs by its class in transformers, which shows no layers. {_NOT_RUN}")
    wanted = (spec.hidden_size, spec.vocab_size)
    found = (reads.states.in_features // 3, head.decoder.embedding.num_rows)
    for what, its, own in zip(("hidden states", "a vocabulary"), found, wanted, strict=True):
        if its != own:
            raise _refused(
                f"`{source}` reads {what} of {its}, but the model has {own}. Name a head that was trained for it."
            )
    if not head.decoder.embeds and head.hidden_size != spec.hidden_size:
        raise _refused(
            f"`{source}` has {head.hidden_size} values for a token, but no `embed_tokens.weight`, and the model's "
            f"embedding has {spec.hidden_size}. Name a complete head."
        )
    layers = reads.layers_of(spec.num_layers)
    if not 0 < layers[0] < layers[1] < layers[2] < spec.num_layers:
        raise _refused(
            f"`{source}` reads hidden states before the layers {', '.join(map(str, layers))}, but the model has "
            f"{spec.num_layers}. Name a head that was trained for it."
        )
    _check_context(source, head, longest)
    alone = _alone(config, model=source, quantization="none", kv_cache_dtype="auto")
    return _head(alone, head_path, head, _token_ids(head_path, source, head.vocab_size, settings.method, spec))


def _head(alone: ExecutionConfig, path: Path, head: ModelSpec, token_ids: NDArray[np.int64] | None) -> DraftModel:
    """Return a head whose tensors are those of its declaration. Raises `LoadError`."""
    source = (
        shape_only_weights(path, head)
        if path.is_dir() and lacks_weights(path)
        else open_weights(path, None, head.decoder.stacked)
    )
    try:
        check_tensors(head.decoder.shapes(), DeclaredWeights(source, head.decoder).shapes)
    except WeightsError as error:
        raise _refused(f"the head in `{path}` cannot be used: {error}") from error
    compute = choose_compute(alone, head)
    if not compute.is_native and find_spec("torch") is None:
        raise _refused(
            f"this head needs torch, which is not installed. Install it, or use an image with it. {_NOT_RUN}"
        )
    return DraftModel(alone, path, head, compute, token_ids)


def _token_ids(path: Path, source: str, size: int, method: str, spec: ModelSpec) -> NDArray[np.int64]:
    """Return the ids of the head's tokens in the model's vocabulary."""
    folder = SafetensorsFolder(path)
    found = np.arange(size, dtype=np.int64)
    if folder.has(D2T):
        shift = folder.read(D2T)
        if shift.shape != found.shape or shift.dtype != np.int64:
            raise _refused(f"`{D2T}` of `{source}` is {shift.dtype} {list(shift.shape)}, not int64 [{size}].")
        found = found + shift
    if len(found) and (found.min() < 0 or found.max() >= spec.vocab_size or len(np.unique(found)) != size):
        raise _refused(
            f"`{D2T}` of `{source}` names tokens twice, or beyond the model's {spec.vocab_size}. Name a head that was "
            f"trained for it, or set method {method} to ngram."
        )
    return found


def scratch_blocks(config: ExecutionConfig) -> int:
    """Return the blocks of a row in which tokens are drafted that no block of its sequence has room for."""
    return max(1, -(-(config.speculative.num_tokens - 1) // config.block_size))


def _check_vocabulary(source: str, path: Path, spec: ModelSpec, draft_path: Path, draft_spec: ModelSpec) -> None:
    """Raise `LoadError` unless equal token ids mean equal texts in both models."""
    own, other = load_bundle(path).tokenizer_json, load_bundle(draft_path).tokenizer_json
    if _vocabulary(own) == _vocabulary(other):
        return
    raise _refused(
        f"the tokenizer of `{source}` differs from the model's (their vocabularies have {draft_spec.vocab_size} and "
        f"{spec.vocab_size} tokens): what it drafts would mean other texts. Name a draft model of the same family."
    )


def _vocabulary(tokenizer_json: str) -> object:
    """Return what gives token ids their texts. How texts are cut is not compared: drafts are ids."""
    content = msgspec.json.decode(tokenizer_json)
    model = content.get("model", {})
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return model.get("vocab"), added


def _refused(message: str) -> LoadError:
    return LoadError("SettingsUnsupported", f"`speculative`: {message}")

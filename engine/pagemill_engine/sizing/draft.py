"""Finds the model that drafts tokens and decides whether it fits the model that verifies them, before either is loaded.

The draft model computes the same tokens, keeps their keys and values in blocks of the same numbers, and so shares every
prefix hit. `starting.load_cpu` loads it, `executing.drafter` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_engine.config import EngineConfig, SpeculationConfig
from pagemill_engine.sizing.compute import Compute, choose_compute
from pagemill_engine.sizing.kv_sizes import kv_bytes_per_token
from pagemill_engine.weights.errors import LoadError
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_models.tokenizer_files.load_bundle import load_bundle

METHODS = ("draft",)
"""Methods of `speculative` that a model of their own proposes for."""


class DraftModel(NamedTuple):
    config: EngineConfig
    """The settings with which it is loaded."""
    path: Path
    spec: ModelSpec
    compute: Compute

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.spec, self.compute.kv_dtype)


def find_draft(config: EngineConfig, path: Path, spec: ModelSpec) -> DraftModel | None:
    """Return the draft model of the settings, or None if they name none. `path`, `spec`: the model that verifies.

    Raises `LoadError` and `SourceError`, which name the setting and the remedy.
    """
    settings = config.speculative
    if settings.method not in METHODS or settings.source is None:
        return None
    if spec.pooling is not None:
        raise _refused(f"`{spec.architecture}` generates no text, so nothing can be drafted for it. Remove it.")
    if config.num_ranks > 1:
        raise _refused(
            f"method {settings.method} needs one process, but tensorParallel x pipelineParallel is "
            f"{config.num_ranks}. Set method to ngram."
        )
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    draft_path = resolve_source(settings.source, field="speculative.source")
    draft_spec = load_model_spec(draft_path)
    if draft_spec.pooling is not None or draft_spec.decoder.head is None:
        raise _refused(f"`{settings.source}` generates no text. Name a model that does.")
    if all(window is not None and window < longest for window in spec.decoder.windows()):
        raise _refused(f"`{spec.architecture}` keeps no whole text, but a window of it. Set method to ngram.")
    _check_vocabulary(settings.source, path, spec, draft_path, draft_spec)
    if draft_spec.max_position_embeddings < longest:
        raise _refused(
            f"`{settings.source}` was made for {draft_spec.max_position_embeddings} tokens, but requests may have "
            f"{longest}. Lower maxModelLen, or name a draft model with a longer context."
        )
    alone = msgspec.structs.replace(
        config,
        model=settings.source,
        model_folder=None,
        quantization="none",
        deterministic=False,
        enable_lora=False,
        speculative=SpeculationConfig(method="off"),
    )
    return DraftModel(alone, draft_path, draft_spec, choose_compute(alone, draft_spec))


def scratch_blocks(config: EngineConfig) -> int:
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

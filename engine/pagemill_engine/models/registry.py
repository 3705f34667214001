"""From a checkpoint's architecture string to its definition, imported when first used."""

from __future__ import annotations

import importlib

import torch

from pagemill_engine.models.blocks import CausalLM
from pagemill_engine.models.errors import UnsupportedModelError
from pagemill_kernels.registry import Ops
from pagemill_protocol.model_spec import ModelSpec

_MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
}


def supported_architectures() -> list[str]:
    return sorted(_MODELS)


def build_model(spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """The model with uninitialised weights. Raises `UnsupportedModelError`."""
    if spec.architecture not in _MODELS:
        raise UnsupportedModelError(
            f"The architecture `{spec.architecture}` is not supported. "
            f"Supported: {', '.join(supported_architectures())}."
        )
    module, name = _MODELS[spec.architecture]
    model_class = getattr(importlib.import_module(f"pagemill_engine.models.{module}"), name)
    model: CausalLM = model_class(spec, ops, dtype)
    return model

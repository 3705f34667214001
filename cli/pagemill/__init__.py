"""The pagemill command and the offline API.

`from pagemill import LLM, SamplingParams` is all that offline inference needs. A name's module is imported on first
use, so that `import pagemill`, and with it every command, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill_api.structured_params import StructuredOutputsParams
    from pagemill_engine.async_llm import AsyncLLM, EngineArgs
    from pagemill_engine.async_llm import EngineArgs as AsyncEngineArgs
    from pagemill_engine.llm import LLM
    from pagemill_engine.offline import Prompt as PromptType
    from pagemill_engine.offline import TextPrompt, TokensPrompt
    from pagemill_engine.offline_adapters import LoRARequest
    from pagemill_engine.output.results import (
        BeamSearchOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from pagemill_protocol.request.pooling import PoolingParams
    from pagemill_protocol.request.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_EXPORTS = {
    "LLM": ("pagemill_engine.llm", "LLM"),
    "AsyncEngineArgs": ("pagemill_engine.async_llm", "EngineArgs"),
    "AsyncLLM": ("pagemill_engine.async_llm", "AsyncLLM"),
    "BeamSearchOutput": ("pagemill_engine.output.results", "BeamSearchOutput"),
    "BeamSearchParams": ("pagemill_protocol.request.sampling", "BeamSearchParams"),
    "CompletionOutput": ("pagemill_engine.output.results", "CompletionOutput"),
    "EmbeddingRequestOutput": ("pagemill_engine.output.results", "EmbeddingRequestOutput"),
    "EngineArgs": ("pagemill_engine.async_llm", "EngineArgs"),
    "LoRARequest": ("pagemill_engine.offline_adapters", "LoRARequest"),
    "PoolingParams": ("pagemill_protocol.request.pooling", "PoolingParams"),
    "PromptType": ("pagemill_engine.offline", "Prompt"),
    "RequestOutput": ("pagemill_engine.output.results", "RequestOutput"),
    "RequestOutputKind": ("pagemill_protocol.request.sampling", "RequestOutputKind"),
    "SamplingParams": ("pagemill_protocol.request.sampling", "SamplingParams"),
    "ScoringRequestOutput": ("pagemill_engine.output.results", "ScoringRequestOutput"),
    "StructuredOutputsParams": ("pagemill_api.structured_params", "StructuredOutputsParams"),
    "TextPrompt": ("pagemill_engine.offline", "TextPrompt"),
    "TokensPrompt": ("pagemill_engine.offline", "TokensPrompt"),
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)

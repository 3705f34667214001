"""The pagemill command and the offline API.

`from pagemill import LLM, SamplingParams` is all that offline inference needs. The names are loaded when they are used,
so that `import pagemill` (and with it every command) stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill_engine.llm import LLM
    from pagemill_engine.output.results import BeamSearchOutput, CompletionOutput, RequestOutput
    from pagemill_protocol.sampling import BeamSearchParams, SamplingParams
    from pagemill_protocol.structured_params import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "pagemill_engine.llm",
    "BeamSearchOutput": "pagemill_engine.output.results",
    "BeamSearchParams": "pagemill_protocol.sampling",
    "CompletionOutput": "pagemill_engine.output.results",
    "RequestOutput": "pagemill_engine.output.results",
    "SamplingParams": "pagemill_protocol.sampling",
    "StructuredOutputsParams": "pagemill_protocol.structured_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

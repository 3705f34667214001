"""Adapters of the offline API: `LoRARequest`, and which adapter each prompt asks for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.adapter_requests import AdapterRequests
from pagemill_models.adapters.errors import AdapterError, refused
from pagemill_models.sources import SourceError, resolve_adapter
from pagemill_protocol.errors import PagemillError, invalid_field, show_python


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that PEFT wrote, with vLLM's field names."""

    lora_name: str
    lora_int_id: int
    """Number of the adapter, from 1. One with another number is read again from its folder."""
    lora_path: str
    """Its folder, or any source that a model may have."""

    def __post_init__(self) -> None:
        if not self.lora_name or not isinstance(self.lora_name, str):
            raise ValueError(f"lora_name must be a name, got {self.lora_name!r}.")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be a whole number from 1 on, got {self.lora_int_id!r}.")
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise ValueError(f"lora_path must be the folder of an adapter, got {self.lora_path!r}.")


class OfflineAdapters:
    """The adapters that an `LLM` has read."""

    def __init__(self, config: EngineConfig, requests: AdapterRequests | None) -> None:
        self._config, self._requests = config, requests
        self._digests: dict[LoRARequest, str] = {}

    def digests(self, lora_request: Any, num_prompts: int) -> list[str]:
        """Return the digest of each prompt's adapter; "": the model alone. Raises `PagemillError`."""
        given = requests_of(lora_request, num_prompts)
        return [self._digest(each) if each is not None else "" for each in given]

    def _digest(self, request: LoRARequest) -> str:
        if self._requests is None:
            raise serves_none("LLM")
        if request not in self._digests:
            try:
                path = resolve_adapter(request.lora_path, "lora_path")
                self._digests[request] = self._requests.load(path).digest
            except (AdapterError, SourceError) as error:
                raise refused(error.message, "lora_request") from error
        return self._digests[request]


def serves_none(name: str) -> PagemillError:
    message = f"This {name} serves no adapters. Make it with enable_lora=True."
    return invalid_field("lora_request", message, code="unsupported_parameter")


def requests_of(lora_request: Any, num_prompts: int) -> Sequence[LoRARequest | None]:
    """Return each prompt's adapter. Raises `PagemillError`."""
    given = lora_request if isinstance(lora_request, list | tuple) else [lora_request] * num_prompts
    if len(given) != num_prompts:
        message = f"{num_prompts} prompts came with {len(given)} adapters. Send one, or one each, or None."
        raise invalid_field("lora_request", message)
    for each in given:
        if each is not None and not isinstance(each, LoRARequest):
            shown = f"{show_python(each)} ({type(each).__name__})"
            raise invalid_field("lora_request", f"lora_request must be a LoRARequest or None, got {shown}.")
    return given


def check_none(lora_request: Any) -> None:
    """Raise `PagemillError` for an adapter where none is served."""
    given = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    if any(each is not None for each in given):
        message = "lora_request must be None here: `LLM.generate`, `chat` and `beam_search` take adapters."
        raise invalid_field("lora_request", message, code="unsupported_parameter")

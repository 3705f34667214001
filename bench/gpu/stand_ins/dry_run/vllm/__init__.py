"""In place of vLLM in a dry run: the same calls, and tokens at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__version__ = "dry_run"


class SamplingParams:
    def __init__(self, *, temperature: float, max_tokens: int, ignore_eos: bool, detokenize: bool) -> None:
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model: str, *, skip_tokenizer_init: bool, dtype: str, max_model_len: int) -> None:
        self.model = model

    def generate(self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * each.max_tokens)]) for each in params]

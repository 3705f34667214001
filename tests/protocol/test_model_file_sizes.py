"""The cost of a model family, in lines of its one file."""

from __future__ import annotations

from pathlib import Path

import pytest

import pagemill_models.declaration.known as known
import pagemill_models.families as families

LLAMA_LIKE = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma3",
    "granite",
    "phi",
    "phi3",
    "smollm3",
    "stablelm",
    "starcoder2",
    "cohere",
    "nemotron",
    "internlm",
    "internlm3",
    "aquila",
    "olmo2",
    "olmoe",
)
"""Families that state their differences from Llama, and define no new kind of layer or tensor layout."""


def lines_of(module: str) -> int:
    """Return the lines of the family's module without empty lines."""
    assert module in known.BUILT_IN
    text = (Path(families.__file__ or "").parent / f"{module}.py").read_text()
    return sum(bool(line.strip()) for line in text.splitlines())


@pytest.mark.parametrize("module", LLAMA_LIKE)
def test_a_family_like_llama_takes_less_than_60_lines(module: str) -> None:
    assert lines_of(module) < 60


def test_gpt2_takes_less_than_150_lines() -> None:
    assert lines_of("gpt2") < 150

"""GGUF files of hybrids give the answers of the folders with equal weights, whatever converters did to their tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_gguf import write_family_gguf
from gguf_files import HYBRID_FILES, PROMPTS
from hybrid_models import write_hybrid

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
NUM_TOKENS = 8
SHORT = ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "bamba", "falcon-h1", "nemotron_h_moe", "kimi-linear")
"""Of each kind of file, one shape in every run."""


def assert_equal_answers(one: Path, other: Path, load: Loader, make_driver: Drivers) -> None:
    expected, found = (make_driver(load(path)).greedy(PROMPTS, NUM_TOKENS) for path in (one, other))
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(here.logprobs), torch.tensor(there.logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in HYBRID_FILES]
)
def test_a_gguf_file_of_a_hybrid_gives_the_answers_of_its_folder(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    architecture, model = HYBRID_FILES[name]
    write_hybrid(*model, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)

"""Families of 2025 and 2026 give the greedy answers of transformers, whole, in chunks and after prefix hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_models
import family_models
import pytest
from family_models import VOCAB_SIZE, write_model
from greedy_families import NUM_TOKENS, family_of, tokens_of
from msgspec.structs import replace

from pagemill_engine.decoders.on_torch import blocks, latent_attention
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_protocol.source_errors import SourceError

LENGTHS = (1, 17, 33, 90, 150)
CASES = {**family_models.NEW, **expert_models.NEW}


@pytest.mark.sample("glm4_moe_lite", "hunyuan_v1_moe", "minimax_m2", "mistral4", "olmo3")
@pytest.mark.parametrize("name", CASES)
def test_answers_equal_transformers(
    name: str, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    family = family_of(write_model(*CASES[name], tmp_path), tmp_path, VOCAB_SIZE, LENGTHS)
    assert family.median_gap > 0.3
    driver = make_driver(runner_loader(tmp_path))
    for settings in ({"enable_prefix_caching": False, "max_num_batched_tokens": 29}, {"waves": True}):
        results = driver.greedy(family.prompts, NUM_TOKENS, **settings)
        assert tokens_of(results) == family.expected


def without_growth(spec: Any, positions: Any) -> Any:
    return positions.new_ones((len(positions), 1, 1)).float()


@pytest.mark.parametrize("name", ["ministral3", pytest.param("mistral4", marks=pytest.mark.full)])
def test_without_the_growth_of_queries_the_answers_differ(
    name: str,
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = family_of(write_model(*CASES[name], tmp_path), tmp_path, VOCAB_SIZE, LENGTHS[-1:])
    monkeypatch.setattr(blocks, "growth", without_growth)
    monkeypatch.setattr(latent_attention, "growth", without_growth)
    assert tokens_of(make_driver(runner_loader(tmp_path)).greedy(family.prompts, NUM_TOKENS)) != family.expected


def test_with_norms_before_the_rotation_the_answers_differ(
    tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    family = family_of(write_model(*CASES["hunyuan_v1_dense"], tmp_path), tmp_path, VOCAB_SIZE, LENGTHS[-1:])
    runner = runner_loader(tmp_path, by_torch=True)
    for layer in runner.model.model.layers:
        attention, _ = layer.blocks()
        attention.spec = replace(attention.spec, norms_behind_rotation=False)
    assert tokens_of(make_driver(runner).greedy(family.prompts, NUM_TOKENS)) != family.expected


def test_one_number_for_each_layer_is_read_where_all_are_the_same() -> None:
    architecture, overrides = CASES["hunyuan_v1_moe"]
    values = {"vocab_size": VOCAB_SIZE, **overrides, "architectures": [architecture], "moe_topk": [2, 2, 2]}
    spec = decoder_from_config(values, Path("config.json"))
    assert {mixture.top_k for mixture in spec.mixtures()} == {2}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("exaone4", {"layer_types": ["sliding_attention", "linear_attention"] * 2}, "`linear_attention`"),
        ("olmo3", {"layer_types": ["sliding_attention"] * 3}, "`layer_types`"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "`mlp_layer_types`"),
        ("minimax_m2", {"use_qk_norm": False}, "`use_qk_norm`"),
        ("ernie4_5_moe", {"use_bias": True}, "`use_bias`"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2, 3]}, "`moe_topk`"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings"),
    ],
)
def test_what_a_family_lacks_is_refused_by_its_key(name: str, changes: dict[str, Any], said: str) -> None:
    architecture, overrides = CASES[name]
    values = {"vocab_size": VOCAB_SIZE, **overrides, "architectures": [architecture], **changes}
    with pytest.raises(SourceError, match=said):
        decoder_from_config(values, Path("config.json"))

"""Families of 2025 and 2026 give the greedy answers of transformers, whole, in chunks and after prefix hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_models
import family_models
import numpy as np
import pytest
from family_models import VOCAB_SIZE, write_model
from greedy_families import NUM_TOKENS, family_of, tokens_of
from msgspec.structs import asdict, replace

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.decoders.native import decoder
from pagemill_execution.decoders.on_torch import blocks, latent_attention
from pagemill_kernels.cpu import library
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import kinds_of
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.source_errors import SourceError

LENGTHS = (1, 17, 33, 90, 150)
CASES = {**family_models.NEW, **expert_models.NEW}
WITH_EXPERTS = "gemma4 with experts"


@pytest.mark.slow
@pytest.mark.sample("gemma4", "glm4_moe_lite", "hunyuan_v1_moe", "minimax_m2", "mistral4", "olmo3")
@pytest.mark.parametrize("name", CASES)
def test_answers_equal_transformers(
    name: str, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    family = family_of(write_model(*CASES[name], tmp_path), tmp_path, VOCAB_SIZE, LENGTHS)
    assert family.median_gap > 0.3
    runner = runner_loader(tmp_path)
    driver = make_driver(runner)
    for settings in ({"enable_prefix_caching": False, "max_num_batched_tokens": 29}, {"waves": True}):
        results = driver.greedy(family.prompts, NUM_TOKENS, **settings)
        assert tokens_of(results) == family.expected
    assert_choices_and_continued_answers(runner, family.prompts[-1], family.expected[-1])


def assert_choices_and_continued_answers(runner: Any, prompt: list[int], expected: list[int]) -> None:
    """Serve two choices, which share the prompt's blocks, and an answer that another engine has begun."""
    core = EngineCore(EngineConfig(model="m", block_size=16), runner)
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    begun: dict[str, Any] = {"resume": [ChoiceResume(0, expected[:9], 0)]}
    for name, sampling, more in (("choices", SamplingParams(**asdict(plain) | {"n": 2}), {}), ("begun", plain, begun)):
        core.add(GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling, **more))
    found: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        for output in core.step().outputs:
            found.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        core.check_integrity()
    assert found["choices", 0] == found["choices", 1] == expected
    assert expected[:9] + found["begun", 0][-(NUM_TOKENS - 9) :] == expected


def faulty(name: str) -> dict[str, Callable[[Any], None]]:
    """Return faults of the operations that only Gemma 4 has; each takes the layers of the model."""

    def attention_of(layer: Any) -> Any:
        return layer.blocks()[0]

    def values(layers: Any) -> None:
        for layer in layers:
            attention_of(layer).value_norm = None

    def shared_keys(layers: Any) -> None:
        assert attention_of(layers[4])._index == 3
        attention_of(layers[4])._index = 1

    def layer_inputs(layers: Any) -> None:
        for layer in layers:
            block = layer.blocks()[-1]
            block.spec = replace(block.spec, layer_input=0)

    def factors(layers: Any) -> None:
        for layer in layers:
            layer.residuals[-1].factor = None

    def scales(layers: Any) -> None:
        for layer in layers:
            layer.blocks()[-1].scales = None

    def router(layers: Any) -> None:
        for layer in layers:
            layer.blocks()[-1].router_norm = layer.blocks()[-1].norm

    found: dict[str, dict[str, Callable[[Any], None]]] = {
        "gemma4": {"values": values, "shared keys": shared_keys, "layer inputs": layer_inputs, "factors": factors},
        WITH_EXPERTS: {"scales": scales, "router": router},
    }
    return found[name]


@pytest.mark.parametrize("name", ["gemma4", pytest.param(WITH_EXPERTS, marks=pytest.mark.full)])
def test_without_an_operation_of_gemma_4_the_log_probabilities_differ(
    name: str, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    asked = {**CASES, **expert_models.VARIANTS}[name]
    write_model(*asked, tmp_path)
    prompts = [[3 + at % 190 for at in range(length)] for length in LENGTHS[-2:]]

    def logprobs(fault: Callable[[Any], None]) -> list[float]:
        runner = runner_loader(tmp_path, by_torch=True)
        fault(runner.model.model.layers)
        return [each for result in make_driver(runner).greedy(prompts, 4) for each in result.logprobs]

    right = logprobs(lambda layers: None)
    for fault in faulty(name).values():
        assert max(abs(one - other) for one, other in zip(logprobs(fault), right, strict=True)) > 1e-3


def of_layers(fault: Callable[[Any], None]) -> Callable[[Any], None]:
    """Plant a fault in what the native call reads of each layer."""

    def planted(runner: Any) -> None:
        for _, layers in runner.model._runs:
            for weights in layers._kept[1]:
                fault(weights.layer)

    return planted


def keys_of_another(runner: Any) -> None:
    """Let the first layer that shares keys read those of an earlier one."""
    assert runner.model._cached_in[4] == 3
    runner.model._cached_in[4] = 1
    runner.model.use_caches(runner.kv_cache.layers)


def of_inputs(**changes: Any) -> Callable[[Any], None]:
    def planted(layer: Any) -> None:
        for field, value in changes.items():
            setattr(library.InputMLP.from_address(layer.input_mlp), field, value)

    return of_layers(planted)


def of_experts(change: Callable[[Any, Any], None]) -> Callable[[Any], None]:
    return of_layers(lambda layer: change(layer, library.ExpertsWeights.from_address(layer.experts)))


NATIVE_FAULTS: dict[str, dict[str, Callable[[Any], None]]] = {
    "gemma4": {
        "values": of_layers(lambda layer: setattr(layer.value_norm, "weight", None)),
        "shared keys": keys_of_another,
        "layer inputs": of_inputs(first_input=0),
        "norm behind": of_inputs(output_norm=library.NormWeights()),
        "factors": of_layers(lambda layer: setattr(layer, "factor", 1.0)),
    },
    WITH_EXPERTS: {
        "scales": of_experts(lambda layer, experts: setattr(experts, "scales", None)),
        "router": of_experts(lambda layer, experts: setattr(experts, "router_norm", layer.mlp_norm)),
        "inputs": of_experts(lambda layer, experts: setattr(experts, "norm", library.NormWeights())),
        "sum": of_layers(lambda layer: setattr(layer.sum_norm, "weight", None)),
    },
}
"""Faults of the operations that only Gemma 4 has."""


@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
@pytest.mark.parametrize("name", ["gemma4", pytest.param(WITH_EXPERTS, marks=pytest.mark.full)])
def test_a_fault_in_native_layers_of_gemma_4_changes_the_log_probabilities(
    name: str, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    write_model(*{**CASES, **expert_models.VARIANTS}[name], tmp_path)
    prompts = [[3 + at % 190 for at in range(length)] for length in LENGTHS[-2:]]

    def logprobs(fault: Callable[[Any], None]) -> list[float]:
        runner = runner_loader(tmp_path, backend="cpu_native")
        fault(runner)
        return [each for result in make_driver(runner).greedy(prompts, 4) for each in result.logprobs]

    right = logprobs(lambda runner: None)
    for fault in NATIVE_FAULTS[name].values():
        assert max(abs(one - other) for one, other in zip(logprobs(fault), right, strict=True)) > 1e-3


def test_layers_that_share_keys_take_no_memory_of_their_own(tmp_path: Path) -> None:
    write_model(*CASES["gemma4"], tmp_path)
    spec = load_model_spec(tmp_path)
    assert [heads for heads, _ in spec.cache_shapes] == [4, 4, 4, 4, 0, 0, 0]
    assert spec.kv_bytes_per_token(4) == 4 * 4 * (3 * 32 + 48)
    kinds = kinds_of(spec.decoder, 16, lambda size: 4 * size, 256)
    assert {kind.name: kind.layers for kind in kinds} == {"full": (2,), "window-24": (0, 1, 3)}


def without_growth(spec: Any, positions: Any) -> Any:
    return positions.new_ones((len(positions), 1, 1)).float()


def equal_factors(growth: Any, positions: Any) -> Any:
    return np.ones(len(positions), dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "by_torch"),
    [("ministral3", False), ("ministral3", True), pytest.param("mistral4", True, marks=pytest.mark.full)],
)
def test_without_the_growth_of_queries_the_answers_differ(
    name: str,
    by_torch: bool,
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = family_of(write_model(*CASES[name], tmp_path), tmp_path, VOCAB_SIZE, LENGTHS[-1:])
    monkeypatch.setattr(blocks, "growth", without_growth)
    monkeypatch.setattr(latent_attention, "growth", without_growth)
    monkeypatch.setattr(decoder, "query_factors", equal_factors)
    runner = runner_loader(tmp_path, by_torch=by_torch)
    assert tokens_of(make_driver(runner).greedy(family.prompts, NUM_TOKENS)) != family.expected


@pytest.mark.parametrize("by_torch", [False, True])
def test_with_norms_before_the_rotation_the_answers_differ(
    by_torch: bool, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    family = family_of(write_model(*CASES["hunyuan_v1_dense"], tmp_path), tmp_path, VOCAB_SIZE, LENGTHS[-1:])
    runner = runner_loader(tmp_path, by_torch=by_torch)
    if by_torch:
        for layer in runner.model.model.layers:
            attention, _ = layer.blocks()
            attention.spec = replace(attention.spec, norms_behind_rotation=False)
    else:
        for _, layers in runner.model._runs:
            for weights in layers._kept[1]:
                weights.layer.norms_behind = 0
    assert tokens_of(make_driver(runner).greedy(family.prompts, NUM_TOKENS)) != family.expected


def test_one_number_for_each_layer_is_read_where_all_are_the_same() -> None:
    architecture, overrides = CASES["hunyuan_v1_moe"]
    values = {"vocab_size": VOCAB_SIZE, **overrides, "architectures": [architecture], "moe_topk": [2, 2, 2]}
    spec = decoder_from_config(values, Path("config.json"))
    assert {mixture.top_k for mixture in spec.mixtures()} == {2}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "`use_bidirectional_attention`"),
        ("gemma4", {"num_kv_shared_layers": 6}, "`num_kv_shared_layers`"),
        (
            "gemma4",
            {"layer_types": ["sliding_attention", "chunked_attention", "full_attention"] * 2 + ["full_attention"]},
            "`chunked_attention`",
        ),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 48}}}, "`per_layer_config`"),
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

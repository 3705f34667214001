"""Mixtures of experts give the greedy answers of Hugging Face transformers on tiny random models.

The tests run prompts alone, in batches and in chunks, on every backend of the CPU. Planted faults must be detected.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import MODELS, VARIANTS, make_family
from greedy_families import NUM_TOKENS, Family, prompt_logprobs, tokens_of

from pagemill_execution.decoders.on_torch.experts import MoE
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_kernels.experts.reference import route
from pagemill_models.spec.model_files import load_model_spec

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(*MODELS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["cpu_native", "cpu"])
def any_backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


@pytest.fixture(scope="module")
def driver(family: Family, any_backend: str, runner_loader: Loader, make_driver: Drivers) -> Any:
    return make_driver(runner_loader(family.folder, backend=any_backend))


def test_the_two_best_tokens_differ_clearly(family: Family) -> None:
    assert family.median_gap > 0.5


def test_one_prompt_at_a_time_equals_transformers(family: Family, driver: Any) -> None:
    assert tokens_of(driver.greedy(family.prompts, NUM_TOKENS, waves=True)) == family.expected


def test_a_batch_equals_transformers(family: Family, driver: Any) -> None:
    results = driver.greedy(family.prompts, NUM_TOKENS, enable_prefix_caching=False)
    assert tokens_of(results) == family.expected


def test_chunks_equal_transformers(family: Family, driver: Any) -> None:
    results = driver.greedy(family.prompts, NUM_TOKENS, max_num_batched_tokens=13, enable_prefix_caching=False)
    assert tokens_of(results) == family.expected


def test_prefix_hits_and_preemption_change_nothing(family: Family, driver: Any) -> None:
    hit = driver.greedy(family.prompts * 2, NUM_TOKENS, waves=True)
    assert tokens_of(hit) == family.expected * 2
    assert sum(result.num_cached_tokens for result in hit[len(family.prompts) :]) >= 16 + 32 + 80 + 192
    preempted = driver.greedy(family.prompts, NUM_TOKENS, num_blocks=16, enable_prefix_caching=False)
    assert tokens_of(preempted) == family.expected
    assert sum(result.num_preemptions for result in preempted) > 0


def test_log_probabilities_equal_transformers(family: Family, driver: Any) -> None:
    """Within 1e-4 and twice the rounding error of transformers."""
    prompt, expected = family.prompts[-1], family.expected[-1]
    exact, rounding = prompt_logprobs(family, prompt + expected)
    ours = torch.tensor(driver.greedy([prompt], NUM_TOKENS)[0].logprobs, dtype=torch.float64)
    torch.testing.assert_close(ours, exact[-len(expected) :], atol=1e-4 + 2 * rounding, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (index % 3 > 0)) for index, name in enumerate(VARIANTS)]
)
def test_variants_equal_transformers(name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers) -> None:
    variant = make_family(*VARIANTS[name], tmp_path)
    assert variant.median_gap > 0.3
    for backend in ("cpu_native", "reference") if library.load() else ("reference",):
        results = make_driver(runner_loader(variant.folder, backend=backend)).greedy(variant.prompts, NUM_TOKENS)
        assert tokens_of(results) == variant.expected


def test_of_experts_with_equal_logits_transformers_choice_is_taken(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    """Two experts of a pair have equal rows of the router, and the third place goes to one of them."""
    family = make_family(*MODELS["qwen3-moe"], tmp_path, tied_experts=True)
    results = make_driver(runner_loader(family.folder)).greedy(family.prompts, NUM_TOKENS)
    assert tokens_of(results) == family.expected


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(*MODELS["gpt-oss"], tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(*MODELS["qwen2-moe"], tmp_path_factory.mktemp("qwen2-moe"))


def mixtures_of(runner: Any) -> list[MoE]:
    blocks = (block for layer in runner.model.model.layers for block in layer.blocks())
    return [block for block in blocks if isinstance(block, MoE)]


def native_weights(runner: Any) -> list[Any]:
    """Return what the native call reads of each layer."""
    return [weights for _, layers in runner.model._runs for weights in layers._kept[1]]


def next_experts(logits: torch.Tensor, top_k: int, renormalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, weights = route(logits, top_k, renormalized)
    return (chosen + 1) % logits.shape[1], weights


def equal_weights(logits: torch.Tensor, top_k: int, renormalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, weights = route(logits, top_k, renormalized)
    return chosen, torch.full_like(weights, 1 / top_k)


def renormalizing(logits: torch.Tensor, top_k: int, renormalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return route(logits, top_k, not renormalized)


@pytest.mark.sample("next_experts")
@pytest.mark.parametrize("fault", [next_experts, equal_weights, renormalizing])
def test_a_fault_in_the_routing_changes_the_answers(
    fault: Any, qwen2: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(qwen2.folder, by_torch=True)
    assert tokens_of(make_driver(runner).greedy(qwen2.prompts, NUM_TOKENS)) == qwen2.expected
    for mixture in mixtures_of(runner):
        mixture._ops = mixture._ops._replace(route=fault)
    assert tokens_of(make_driver(runner).greedy(qwen2.prompts, NUM_TOKENS)) != qwen2.expected


@pytest.mark.parametrize("by_torch", [False, True])
def test_without_its_shared_expert_the_answers_differ(
    by_torch: bool, qwen2: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(qwen2.folder, by_torch=by_torch)
    if by_torch:
        for mixture in mixtures_of(runner):
            mixture.shared = None
    else:
        for weights in native_weights(runner):
            weights.layer.shared = None
    assert tokens_of(make_driver(runner).greedy(qwen2.prompts, NUM_TOKENS)) != qwen2.expected


@pytest.mark.parametrize("fault", ["gate of the shared expert", "shares of the sum"])
def test_a_fault_in_native_mixtures_changes_the_answers(
    fault: str, qwen2: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(qwen2.folder)
    assert tokens_of(make_driver(runner).greedy(qwen2.prompts, NUM_TOKENS)) == qwen2.expected
    for weights in native_weights(runner):
        if not weights.layer.shared:
            continue
        if fault == "gate of the shared expert":
            weights._shared.gate = None
        else:
            weights._experts.renormalized = not weights._experts.renormalized
    assert tokens_of(make_driver(runner).greedy(qwen2.prompts, NUM_TOKENS)) != qwen2.expected


@pytest.mark.sample("sinks")
@pytest.mark.parametrize("fault", ["sinks", "limit"])
def test_without_sinks_or_limits_the_answers_differ(
    fault: str, gpt_oss: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(gpt_oss.folder, by_torch=True)
    assert tokens_of(make_driver(runner).greedy(gpt_oss.prompts, NUM_TOKENS)) == gpt_oss.expected
    for layer in runner.model.model.layers:
        attention, mixture = layer.blocks()
        if fault == "sinks":
            attention.sinks = None
        else:
            mixture.experts.packed.native._limit = 1e9
    assert tokens_of(make_driver(runner).greedy(gpt_oss.prompts, NUM_TOKENS)) != gpt_oss.expected


@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize(
    "storage", [{}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=["float32", "int4", "bf16"]
)
def test_a_deterministic_engine_gives_the_same_bits_in_every_batch(
    name: str, storage: dict[str, str], qwen2: Family, gpt_oss: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    family = qwen2 if name == "qwen2-moe" else gpt_oss
    driver = make_driver(runner_loader(family.folder, deterministic=True, **storage))
    alone = driver.greedy(family.prompts, 8, waves=True, enable_prefix_caching=False)
    for settings in ({}, {"max_num_batched_tokens": 13}):
        together = driver.greedy(family.prompts, 8, enable_prefix_caching=False, **settings)
        assert [each.logprobs for each in together] == [each.logprobs for each in alone]


def test_quantized_matmuls_of_experts_on_a_gpu_are_refused_by_name(qwen2: Family, runner_loader: Loader) -> None:
    with pytest.raises(LoadError, match="`quantization` w8a8 has no kernel for mixtures of experts"):
        runner_loader(qwen2.folder, device="cuda", quantization="w8a8")


@pytest.mark.slow
@pytest.mark.sample("int4")
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_the_triton_backend_gives_the_answers_of_transformers(
    quantization: str, gpt_oss: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    """Without a device, the test runs in the interpreter."""
    prompts = gpt_oss.prompts[:3]
    results = make_driver(runner_loader(gpt_oss.folder, device="cuda", quantization=quantization)).greedy(prompts, 3)
    expected = [tokens[:3] for tokens in gpt_oss.expected[:3]]
    if quantization != "none":
        native = make_driver(runner_loader(gpt_oss.folder, backend="cpu", quantization=quantization))
        expected = tokens_of(native.greedy(prompts, 3))
    assert tokens_of(results) == expected


def test_experts_are_included_in_the_planned_memory(qwen2: Family, runner_loader: Loader) -> None:
    runner = runner_loader(qwen2.folder, backend="cpu_native")
    assert runner.info.weight_bytes == pytest.approx(4 * load_model_spec(qwen2.folder).num_parameters, rel=0.15)

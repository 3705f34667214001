"""The whole engine on the Triton backend gives the torch backend's tokens, on a device or in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_model import write_gguf
from tiny_llama import write_tiny_llama
from triton.runtime.errors import OutOfResources
from triton_device import DEVICE, HAS_GPU, NO_FP8

from pagemill_engine.config import EngineConfig
from pagemill_execution.decoders.on_torch.layers import Linear
from pagemill_execution.runners.device import device_runner
from pagemill_execution.sizing import budget, compute
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.starting import load_device
from pagemill_execution.starting.compiling import compile_kernels, run_largest, step_shapes
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import open_weights
from pagemill_execution.weights.quantized import QuantizedWeights
from pagemill_kernels.gpu import launch
from pagemill_kernels.gpu.driver import Driver
from pagemill_kernels.linear import triton_launch as linear
from pagemill_kernels.linear.triton_launch import CodesLinear
from pagemill_kernels.registry import ops_for
from pagemill_kernels.sampling import triton_launch as sampling
from pagemill_kernels.scaled_linear.reference import ScaledReference
from pagemill_kernels.scaled_linear.triton_launch import ScaledLinear
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.sampling import SamplingParams

NUM_TOKENS = 3
PROMPTS = [[(7 * i + 3 * length) % 64 for i in range(length)] for length in (1, 16, 20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)


@pytest.fixture(scope="module")
def triton_driver(folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]) -> Any:
    return make_driver(runner_loader(folder, device="cuda", num_kv_blocks=64))


@pytest.fixture(scope="module")
def expected(folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]) -> list[list[int]]:
    """Return the tokens of the torch backend on the CPU."""
    results = make_driver(runner_loader(folder, backend="cpu")).greedy(PROMPTS, NUM_TOKENS)
    return [result.token_ids for result in results]


def test_the_engine_reports_its_backend(triton_driver: Any) -> None:
    assert "Triton" in triton_driver.runner.info.compute
    assert triton_driver.runner.kv_cache.layers[0].device.type == DEVICE.type


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 15}], ids=["batch", "chunks"])
def test_tokens_equal_those_of_the_torch_backend(
    triton_driver: Any, expected: list[list[int]], settings: dict[str, int]
) -> None:
    results = triton_driver.greedy(PROMPTS, NUM_TOKENS, **settings)
    assert [result.token_ids for result in results] == expected


def test_a_prefix_hit_changes_no_token(triton_driver: Any, expected: list[list[int]]) -> None:
    results = triton_driver.greedy([PROMPTS[2]] * 2, NUM_TOKENS, waves=True)
    assert [result.token_ids for result in results] == [expected[2]] * 2
    assert results[1].num_cached_tokens == 16


def test_a_request_that_starts_over_gives_the_same_answer(triton_driver: Any, expected: list[list[int]]) -> None:
    prompts = [PROMPTS[1]] * 2
    results = triton_driver.greedy(prompts, NUM_TOKENS, num_blocks=3, enable_prefix_caching=False)
    assert [result.token_ids for result in results] == [expected[1]] * 2
    assert sum(result.num_preemptions for result in results) > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_give_the_answers_of_the_native_kernels(
    folder: Path, quantization: str, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    answers = [
        make_driver(runner_loader(folder, quantization=quantization, **where)).greedy(PROMPTS[:2], 2)
        for where in ({"device": "cuda"}, {"backend": "cpu"})
    ]
    ours, theirs = ([result.token_ids for result in results] for results in answers)
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.sample("w8a8")
@pytest.mark.parametrize("quantization", ["w8a8", pytest.param("fp8", marks=NO_FP8)])
def test_quantized_matmuls_give_the_answers_of_the_formula(
    folder: Path,
    quantization: str,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = runner_loader(folder, device="cuda", quantization=quantization)
    assert "int8 weights" in runner.info.compute or "fp8 weights" in runner.info.compute
    linears = [layer for layer in runner.model.layers[0].layers() if isinstance(layer, Linear)]
    assert [type(linear.packed) for linear in linears] == [ScaledLinear] * 4
    assert isinstance(runner.model.lm_head.packed, CodesLinear), "the head must keep 8-bit groups"
    weights = QuantizedWeights(open_weights(folder), quantization, runner.model.spec.decoder)
    planned = weights.num_bytes("float32", keep_stored=True)
    assert runner.info.weight_bytes == planned
    ours = make_driver(runner).greedy(PROMPTS, NUM_TOKENS)

    def by_formula(weight: torch.Tensor, bias: torch.Tensor | None) -> ScaledReference:
        pack = ops_for("reference", matmul_type=quantization).pack_linear
        return pack(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))

    others = ops_for("triton")._replace(pack_linear=by_formula)
    monkeypatch.setattr(compute, "ops_for", lambda backend, **settings: others)
    formula = runner_loader(folder, device="cuda", quantization=quantization)
    assert isinstance(formula.model.layers[0].blocks()[1].output.packed, ScaledReference)
    theirs = make_driver(formula).greedy(PROMPTS, NUM_TOKENS)
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    # Matrix units add e4m3 products with fewer bits than float32 has.
    nearly = 0.05 if HAS_GPU and quantization == "fp8" else 1e-4
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=nearly)


@pytest.mark.sample("fp8")
@pytest.mark.parametrize("quantization", ["w8a8", pytest.param("fp8", marks=NO_FP8)])
def test_quantized_matmuls_stay_close_to_those_of_floats(
    folder: Path, quantization: str, triton_driver: Any, runner_loader: Any, make_driver: Any
) -> None:
    exact = triton_driver.greedy(PROMPTS, 1)
    rounded = make_driver(runner_loader(folder, device="cuda", quantization=quantization)).greedy(PROMPTS, 1)
    assert [result.token_ids for result in rounded] == [result.token_ids for result in exact]
    for a, b in zip(rounded, exact, strict=True):
        assert a.logprobs != b.logprobs
        assert a.logprobs == pytest.approx(b.logprobs, abs=0.3)


@pytest.mark.sample("w8a8")
@pytest.mark.parametrize("quantization", ["w8a8", pytest.param("fp8", marks=NO_FP8)])
def test_float_matrices_of_a_partly_quantized_file_follow_the_setting(
    tmp_path: Path, quantization: str, runner_loader: Any, make_driver: Any
) -> None:
    """Stored quantized weights stay as they are, and the planned memory is that of the loaded weights."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.4, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path / "mixed.gguf"
    write_gguf(path, transformers.LlamaForCausalLM(config), {"ffn": "Q8_0"})
    runner = runner_loader(path, device="cuda", quantization=quantization)
    assert runner.info.compute.endswith("weights and activations where the file has floats")
    attention, mlp = runner.model.layers[0].blocks()
    assert all(isinstance(each.packed, ScaledLinear) for each in (attention.qkv, attention.output))
    assert all(isinstance(each.packed, CodesLinear) for each in (mlp.up, mlp.output))
    weights = QuantizedWeights(open_weights(path), quantization, runner.model.spec.decoder)
    planned = weights.num_bytes("float32", keep_stored=True)
    biases = 4 * (32 + 16 + 16)
    assert planned == runner.info.weight_bytes + biases
    ours, exact = (make_driver(each).greedy(PROMPTS, 1) for each in (runner, runner_loader(path, device="cuda")))
    for a, b in zip(ours, exact, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=0.3)


SAMPLED = {
    "filters": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "biases and log probabilities": {"logit_bias": {5: 3.0}, "min_tokens": 2, "stop_token_ids": [9], "logprobs": 3},
}


def test_sampled_answers_are_determined_by_the_seeds(
    folder: Path, triton_driver: Any, runner_loader: Any, make_driver: Any
) -> None:
    params = [
        SamplingParams(temperature=1.2, seed=seed, max_tokens=3, ignore_eos=True, **fields)
        for seed, fields in enumerate(SAMPLED.values())
    ]
    on_cpu = make_driver(runner_loader(folder, backend="cpu")).generate(PROMPTS, params)
    ours = triton_driver.generate(PROMPTS, params)
    assert [result.token_ids for result in ours] == [result.token_ids for result in on_cpu]
    assert ours[2].logprobs == pytest.approx(on_cpu[2].logprobs, abs=1e-4)


def test_logits_are_sampled_without_a_copy(triton_driver: Any) -> None:
    runner = triton_driver.runner
    assert runner._ops.sample_tokens is sampling.sample_tokens
    counts = runner._sampling.counts
    assert counts is None or counts.in_output.device.type == DEVICE.type


@pytest.mark.sample("int8")
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=NO_FP8)])
def test_a_quantized_cache_keeps_answers_close(
    folder: Path, kind: str, triton_driver: Any, runner_loader: Any, make_driver: Any
) -> None:
    runner = runner_loader(folder, device="cuda", kv_cache_dtype=kind)
    assert runner.info.kv_dtype == kind
    assert runner.info.kv_bytes_per_token == 2 * 2 * (16 + 4)
    ours, exact = (driver.greedy(PROMPTS[1:2], NUM_TOKENS)[0] for driver in (make_driver(runner), triton_driver))
    assert ours.token_ids == exact.token_ids
    assert ours.logprobs != exact.logprobs
    assert ours.logprobs == pytest.approx(exact.logprobs, abs=0.2)


@pytest.mark.parametrize(
    ("settings", "kept"), [({"kv_cache_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16")], ids=str
)
def test_a_cache_of_16_bits_keeps_answers_close(
    folder: Path, settings: dict[str, str], kept: str, triton_driver: Any, runner_loader: Any, make_driver: Any
) -> None:
    runner = runner_loader(folder, device="cuda", **settings)
    assert (runner.info.kv_dtype, runner.info.kv_bytes_per_token) == (kept, 2 * 2 * 16 * 2)
    ours, exact = (driver.greedy(PROMPTS[1:2], NUM_TOKENS)[0] for driver in (make_driver(runner), triton_driver))
    assert ours.token_ids == exact.token_ids
    assert ours.logprobs != exact.logprobs
    assert ours.logprobs == pytest.approx(exact.logprobs, abs=0.05)


@pytest.mark.sample("fp8")
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=NO_FP8)])
def test_a_prefix_in_a_quantized_cache_is_reused(folder: Path, kind: str, runner_loader: Any, make_driver: Any) -> None:
    driver = make_driver(runner_loader(folder, device="cuda", kv_cache_dtype=kind))
    first, second = driver.greedy([PROMPTS[2]] * 2, NUM_TOKENS, waves=True)
    assert second.num_cached_tokens == 16
    assert second.token_ids == first.token_ids


def test_compilation_steps_leave_no_state(triton_driver: Any, expected: list[list[int]]) -> None:
    runner = triton_driver.runner
    compile_kernels(runner, EngineConfig(model="test", max_num_seqs=2, max_num_batched_tokens=5))
    assert not any(cache[-1].any() for cache in runner.kv_cache.layers)
    assert triton_driver.greedy(PROMPTS[:1], NUM_TOKENS)[0].token_ids == expected[0]


def test_every_tile_size_is_compiled_before_the_first_request() -> None:
    config = EngineConfig(model="test", max_num_seqs=100, max_num_batched_tokens=600)
    shapes = step_shapes(config, max_model_len=512)
    assert (100, 100) in shapes
    assert (1, 512) in shapes
    assert (100, 600) in shapes, "the largest step has all tokens and the maximum number of requests"
    compiled = {linear.choose_tiles(num_tokens, 32) for _, num_tokens in shapes}
    assert compiled == {linear.choose_tiles(num_rows, 32) for num_rows in range(1, 601)}


def test_an_error_for_a_step_too_large_for_the_device_names_its_settings(
    triton_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*shape: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(triton_driver.runner, "warm_up", full)
    for run in (compile_kernels, run_largest):
        with pytest.raises(LoadError, match=r"maxNumBatchedTokens 512 .* kvCacheMemory") as caught:
            run(triton_driver.runner, EngineConfig(model="test"))
        assert caught.value.reason == "StepTooLarge"


def test_a_kernel_too_large_for_the_device_is_refused_with_an_alternative(
    triton_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*shape: int) -> None:
        raise OutOfResources(140_000, 101_376, "shared memory")

    monkeypatch.setattr(triton_driver.runner, "warm_up", too_large)
    with pytest.raises(
        LoadError, match=r"`dtype` float32 .*140000.* Set dtype to bfloat16, or device to cpu"
    ) as caught:
        compile_kernels(triton_driver.runner, EngineConfig(model="test", dtype="float32"))
    assert caught.value.reason == "SettingsUnsupported"


@pytest.mark.parametrize("place", ["pack_linear", "decoder_tables", "RowState"])
def test_an_error_for_a_device_that_is_full_during_loading_names_what_to_lower(
    folder: Path, place: str, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80")

    others = ops_for("triton")._replace(pack_linear=full)
    if place == "pack_linear":
        monkeypatch.setattr(compute, "ops_for", lambda backend, **settings: others)
    monkeypatch.setattr({"RowState": device_runner}.get(place, load_device), place, full, raising=False)
    with pytest.raises(LoadError, match=r"out of memory while .* smaller or quantized model, or lower maxNumSeqs") as e:
        runner_loader(folder, device="cuda")
    assert e.value.reason == "ModelTooLarge"


def test_settings_and_models_without_kernels_are_refused(
    folder: Path, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    with pytest.raises(LoadError, match="deterministic"):
        runner_loader(folder, device="cuda", deterministic=True)
    with pytest.raises(LoadError, match=r"heads of 8; .* Set device to cpu"):
        runner_loader(write_tiny_llama(tmp_path, num_hidden_layers=1), device="cuda")
    with pytest.raises(LoadError, match=r"blocks of 24 tokens; .* Set block_size to 16 or 32"):
        runner_loader(folder, device="cuda", block_size=24)
    with pytest.raises(LoadError, match=r"`quantization` w8a8 needs an NVIDIA GPU.* Set quantization to int8 or int4"):
        runner_loader(folder, quantization="w8a8")
    with pytest.raises(LoadError, match=r"`kv_cache_dtype` fp8 needs an NVIDIA GPU.* Set kv_cache_dtype to int8"):
        runner_loader(folder, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"quantization": "fp8"}, r"`quantization` fp8 .* 8\.6, fp8 needs 8\.9 .* Set it to w8a8 or int8"),
        ({"kv_cache_dtype": "fp8"}, r"`kv_cache_dtype` fp8 .* 8\.6, fp8 needs 8\.9 .* Set it to int8"),
    ],
    ids=str,
)
def test_fp8_is_refused_if_the_device_does_not_support_it(
    folder: Path, settings: dict[str, str], remedy: str, runner_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "A10 has compute capability 8.6, fp8 needs 8.9 (L4, H100 and later)"
    monkeypatch.setattr(launch, "fp8_problem", lambda: problem)
    with pytest.raises(LoadError, match=remedy):
        runner_loader(folder, device="cuda", **settings)
    assert runner_loader(folder, device="cuda", quantization="w8a8").info.device == DEVICE.type


@pytest.mark.skipif(HAS_GPU, reason="there is a device")
def test_without_a_device_cuda_is_refused_and_auto_selects_the_cpu(
    folder: Path, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    assert "Triton" not in runner_loader(folder, device="auto").info.compute
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(LoadError, match=r"DeviceUnavailable: .* no CUDA device is visible"):
        runner_loader(folder, device="cuda")


def test_cuda_without_torch_is_refused_with_both_remedies(
    folder: Path, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_execution.sizing.compute.has_torch", lambda: False)
    with pytest.raises(LoadError, match=r"DeviceUnavailable: .* needs torch, .* image for GPUs, .* device to cpu"):
        runner_loader(folder, device="cuda")


@pytest.mark.parametrize(
    ("capability", "settings", "words"),
    [
        ((7, 5), {"device": "cuda"}, r"DeviceUnavailable: .* T4 has compute capability 7\.5, .* or set device to cpu"),
        (
            (8, 0),
            {"device": "cuda", "block_size": 8},
            r"SettingsUnsupported: .* blocks of 8 tokens; .* block_size to 16",
        ),
        (
            (8, 0),
            {"device": "auto", "block_size": 8},
            r"SettingsUnsupported: .* blocks of 8 tokens; .* block_size to 16",
        ),
        ((8, 6), {"device": "cuda", "kv_cache_dtype": "fp8"}, r"SettingsUnsupported: .* 8\.6, fp8 .* Set it to int8"),
    ],
)
def test_a_device_that_is_too_old_is_refused_with_the_remedy(
    folder: Path,
    capability: tuple[int, int],
    settings: dict[str, Any],
    words: str,
    runner_loader: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(compute, "find_driver", lambda: Driver((13, 0), None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "T4")
    with pytest.raises(LoadError, match=words):
        runner_loader(folder, **settings)


def test_the_cache_gets_a_gpus_memory_after_weights_and_the_largest_step(folder: Path) -> None:
    sizes = budget.Sizes(weight_bytes=16 << 30, kv_bytes_per_token=131072, item_bytes=2, gathers=False)
    state = MemoryState(limit_bytes=80 << 30, available_bytes=78 << 30, process_bytes=0, is_gpu=True)
    plan = budget.plan_memory(EngineConfig(model="test"), load_model_spec(folder), sizes, state)
    assert plan.budget.kv_bytes > 50 << 30
    assert plan.budget.free_bytes >= int(7.5 * 2**30)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_on_a_device(folder: Path, dtype: str, runner_loader: Any, make_driver: Any) -> None:
    results = make_driver(runner_loader(folder, device="cuda", dtype=dtype)).greedy(PROMPTS * 8, 32)
    assert all(len(result.token_ids) == 32 and result.error is None for result in results)

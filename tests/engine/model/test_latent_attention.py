"""DeepSeek's latent attention keeps one compressed vector per token, and unsupported variants are refused by name.

Planted faults in the attention and in the choice of experts change the answers. `test_experts` checks equality.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import DEEPSEEK_V2, MODELS, make_family
from family_models import write_model
from greedy_families import NUM_TOKENS, Family, tokens_of
from safetensors.torch import load_file, save_file

from pagemill_execution.decoders.on_torch.experts import MoE
from pagemill_execution.decoders.on_torch.latent_attention import LatentAttention
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_models.sources import SourceError
from pagemill_models.spec.model_files import load_model_spec

needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
CACHED = 24 + 8
"""The number of values of a token in one layer's cache: `kv_lora_rank` + `qk_rope_head_dim`."""


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(*MODELS["deepseek-v3"], tmp_path_factory.mktemp("deepseek-v3"))


def latent_attentions(runner: Any) -> list[LatentAttention]:
    blocks = (block for layer in runner.model.model.layers for block in layer.blocks())
    return [block for block in blocks if isinstance(block, LatentAttention)]


@pytest.mark.parametrize("backend", ["cpu_native", "reference"])
def test_the_cache_of_a_token_is_its_latent_and_its_shared_key(backend: str, v3: Family, runner_loader: Loader) -> None:
    if backend == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    runner = runner_loader(v3.folder, backend=backend, num_kv_blocks=32)
    assert runner.info.kv_bytes_per_token == 3 * CACHED * 4
    assert load_model_spec(v3.folder).kv_bytes_per_token(2) == 3 * CACHED * 2
    assert runner.kv_cache.num_bytes == 32 * 16 * 3 * CACHED * 4
    assert [each.shape for each in runner.kv_cache.layers] == [(33, 1, 16, CACHED)] * 3


def without_shared_key(attention: LatentAttention) -> None:
    attention.ops = attention.ops._replace(rotate=lambda x, cos, sin: x.zero_())


def without_rotation(attention: LatentAttention) -> None:
    attention.ops = attention.ops._replace(rotate=lambda x, cos, sin: None)


def with_another_heads_keys(attention: LatentAttention) -> None:
    attention.up.weight = attention.up.weight.roll(1, 0)


def without_a_norm(attention: LatentAttention) -> None:
    attention.latent_norm._normalize = lambda x: x


def with_the_last_token_alone(attention: LatentAttention) -> None:
    store = attention.ops.store_latents
    attention.ops = attention.ops._replace(store_latents=lambda x, cache, slots: store(x[-1:], cache, slots[-1:]))


def with_the_scale_of_whole_keys(attention: LatentAttention) -> None:
    attend = attention.ops.paged_attention
    attention.ops = attention.ops._replace(paged_attention=lambda *args: attend(*args[:-1], 24**-0.5))


@pytest.mark.parametrize(
    "fault",
    [
        without_shared_key,
        without_rotation,
        with_another_heads_keys,
        without_a_norm,
        with_the_last_token_alone,
        with_the_scale_of_whole_keys,
    ],
)
def test_a_fault_in_latent_attention_changes_the_answers(
    fault: Callable[[LatentAttention], None], v3: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(v3.folder, by_torch=True)
    for attention in latent_attentions(runner):
        fault(attention)
    assert tokens_of(make_driver(runner).greedy(v3.prompts, NUM_TOKENS)) != v3.expected


def native_faults(fault: str, layers: Any) -> None:
    """Plant a fault in what the native call reads of each layer."""
    if fault == "no rotation":
        layers._rotations = [None] * len(layers._rotations)
        return
    for weights in layers._kept[1]:
        latent = weights._latent
        if fault == "keys of another head":
            latent.keys = rolled(weights, "_keys")
        elif fault == "values of another head":
            latent.values = rolled(weights, "_values")
        elif fault == "another norm":
            latent.latent_norm.eps = 10.0
        else:
            weights.layer.scale = 24**-0.5


def rolled(weights: Any, name: str) -> int:
    addresses = getattr(weights, name)
    addresses[:] = [*addresses[1:], addresses[0]]
    return ctypes.addressof(addresses)


@needs_kernels
@pytest.mark.parametrize(
    "fault", ["no rotation", "keys of another head", "values of another head", "another norm", "scale of whole keys"]
)
def test_a_fault_in_native_latent_attention_changes_the_answers(
    fault: str, v3: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(v3.folder, backend="cpu_native")
    for _, layers in runner.model._runs:
        native_faults(fault, layers)
    assert tokens_of(make_driver(runner).greedy(v3.prompts, NUM_TOKENS)) != v3.expected


@needs_kernels
def test_answers_of_latents_have_the_same_bits_in_every_batch_and_chunk(
    v3: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    driver = make_driver(runner_loader(v3.folder, backend="cpu_native", deterministic=True))
    settings = ({"waves": True}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 13}, {"num_blocks": 16})
    first, *others = [driver.greedy(v3.prompts, NUM_TOKENS, **each) for each in settings]
    assert tokens_of(first) == v3.expected
    for other in others:
        assert [each.logprobs for each in other] == [each.logprobs for each in first]


@needs_kernels
def test_latents_in_8_bits_stay_close(v3: Family, runner_loader: Loader, make_driver: Drivers) -> None:
    runner = runner_loader(v3.folder, backend="cpu_native", kv_cache_dtype="int8")
    assert runner.info.kv_bytes_per_token == 3 * (CACHED + 4)
    rounded = make_driver(runner).greedy(v3.prompts, 1)
    same = [each.token_ids == expected[:1] for each, expected in zip(rounded, v3.expected, strict=True)]
    assert sum(same) >= len(same) - 2


@pytest.mark.parametrize(
    "change", [{"scores": "softmax"}, {"top_groups": 4}, {"best_of_group": 1}, {"scale": 1.0}, {}], ids=str
)
def test_a_fault_in_the_choice_of_expert_groups_changes_the_answers(
    change: dict[str, Any], v3: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    runner = runner_loader(v3.folder, by_torch=True)
    mixtures = [block for layer in runner.model.model.layers for block in layer.blocks() if isinstance(block, MoE)]
    for mixture in mixtures:
        assert mixture.gating is not None
        mixture.gating = mixture.gating._replace(**change)
        mixture.choice_bias = mixture.choice_bias if change else None
    assert tokens_of(make_driver(runner).greedy(v3.prompts, NUM_TOKENS)) != v3.expected


def test_the_magnitude_of_yarn_scales_the_scores(v3: Family) -> None:
    attention = next(load_model_spec(v3.folder).decoder.attentions())
    assert attention.scale == pytest.approx((1 + 0.1 * 1.2 * torch.tensor(4.0).log().item()) ** 2 / 24**0.5)


def test_layers_for_multi_token_prediction_are_not_loaded(
    v3: Family, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    tensors = load_file(v3.folder / "model.safetensors")
    drafting = {
        name.replace("layers.2.", "layers.3."): each.clone() for name, each in tensors.items() if ".layers.2." in name
    }
    save_file(
        {**tensors, **drafting, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors"
    )
    config = json.loads((v3.folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_spec(tmp_path).num_parameters == load_model_spec(v3.folder).num_parameters
    results = make_driver(runner_loader(tmp_path)).greedy(v3.prompts[:3], NUM_TOKENS)
    assert tokens_of(results) == v3.expected[:3]


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "auto"}, {"quantization": "int8"}], ids=str)
def test_smaller_cache_types_stay_close(
    settings: dict[str, str], v3: Family, runner_loader: Loader, make_driver: Drivers
) -> None:
    exact = make_driver(runner_loader(v3.folder)).greedy(v3.prompts, 1)
    rounded = make_driver(runner_loader(v3.folder, **settings)).greedy(v3.prompts, 1)
    same = [a.token_ids == b.token_ids for a, b in zip(exact, rounded, strict=True)]
    assert sum(same) >= len(same) - 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "`device` cuda cannot run this model: the Triton kernels have no latent attention"),
        ({"kv_cache_dtype": "int8", "backend": "cpu"}, "`kv_cache_dtype` int8 needs the native kernels"),
        ({"deterministic": True, "backend": "cpu"}, "`deterministic` true needs the native kernels"),
    ],
)
def test_a_backend_without_a_kernel_for_latents_is_refused_by_name(
    settings: dict[str, Any], message: str, v3: Family, runner_loader: Loader
) -> None:
    with pytest.raises(LoadError, match=message):
        runner_loader(v3.folder, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 7}, "needs an even one"),
        ({"n_group": 3}, "`n_group` is '3'; it must be a divisor of the 8 experts"),
        ({"topk_group": 1}, "`topk_group` is '1'; it must be at most the 4 groups, with 3 experts or more"),
        ({"topk_method": "noaux"}, "`topk_method` is 'noaux'; it must be one of greedy, group_limited_greedy"),
        ({"moe_layer_freq": 2}, r"dense layers between mixtures of experts \(`moe_layer_freq`\)"),
        ({"mlp_bias": True}, r"biases of MLPs \(`mlp_bias`\)"),
        ({"kv_lora_rank": 0}, "declares kv_lora_rank = 0"),
    ],
)
def test_an_unsupported_configuration_is_refused_by_its_header(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model("DeepseekV2ForCausalLM", DEEPSEEK_V2, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SourceError, match=message):
        load_model_spec(tmp_path)


def test_a_checkpoint_in_fp8_gives_the_answers_of_its_values(
    v3: Family, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    """DeepSeek-V3 has E4M3 matrices with a scale for each square, and its other weights are floats."""
    block, config = 16, json.loads((v3.folder / "config.json").read_text())
    packed, decoded = {}, {}
    for name, tensor in load_file(v3.folder / "model.safetensors").items():
        packed[name] = decoded[name] = tensor
        if tensor.dim() != 2 or "_proj" not in name:
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        factors = 0.002 + 0.001 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
        spread = factors.repeat_interleave(block, 0).repeat_interleave(block, 1)[: len(tensor), : tensor.shape[1]]
        packed[name] = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        packed[name.replace(".weight", ".weight_scale_inv")] = factors
        decoded[name] = packed[name].float() * spread
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    for which, tensors in (("packed", packed), ("decoded", decoded)):
        (tmp_path / which).mkdir()
        save_file(tensors, tmp_path / which / "model.safetensors")
        settings = {"quantization_config": quantized} if which == "packed" else {}
        (tmp_path / which / "config.json").write_text(json.dumps(config | settings))
    drivers = [make_driver(runner_loader(tmp_path / which)) for which in ("packed", "decoded")]
    found, expected = (tokens_of(driver.greedy(v3.prompts, NUM_TOKENS)) for driver in drivers)
    assert found == expected
    assert found != v3.expected

"""Experts in other file formats than those of transformers: GGUF's stacked tensors and MXFP4 in both formats.

The matrices may also be quantized during loading. The answers equal those of transformers on the stored values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy_families import greedy_reference
from moe_gguf import write_moe_gguf
from outlines import outline
from packed_models import SHAPE, write_mxfp4
from safetensors.torch import load_file, save_file

from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.sizing import sizes_here, sizes_on_gpu
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.model_files import load_model_spec, load_spec_without_weights

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
NUM_TOKENS = 12
PROMPTS: list[list[int]] = [[3 + 7 * at % 120 for at in range(length)] for length in (1, 5, 40)]
QWEN = {**SHAPE, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("MixtralForCausalLM", {**SHAPE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2moe": ("Qwen2MoeForCausalLM", {**QWEN, "shared_expert_intermediate_size": 64}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**SHAPE, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24}
        | {"rope_parameters": YARN},
    ),
}


def make(architecture: str) -> Any:
    name, overrides = FAMILIES[architecture]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**overrides)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
    return model


def expected(model: Any) -> list[list[int]]:
    return [greedy_reference(model, list(prompt), NUM_TOKENS)[0] for prompt in PROMPTS]


def answers(path: Path, runner_loader: Loader, make_driver: Drivers, **settings: Any) -> list[list[int]]:
    results = make_driver(runner_loader(path, **settings)).greedy(PROMPTS, NUM_TOKENS)
    return [result.token_ids for result in results]


@pytest.mark.sample("*-Q4_0-*", "*-MXFP4-gpt-oss")
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "MXFP4"])
def test_a_gguf_file_gives_the_answers_of_its_values(
    architecture: str, kind: str, tmp_path: Path, backend: str, runner_loader: Loader, make_driver: Drivers
) -> None:
    model, path = make(architecture), tmp_path / "model.gguf"
    write_moe_gguf(path, model, architecture, kind)
    assert answers(path, runner_loader, make_driver, backend=backend) == expected(model)


@pytest.mark.slow
def test_each_expert_of_a_gguf_file_may_have_a_factor_of_its_own(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    model, path = make("qwen3moe"), tmp_path / "model.gguf"
    factors = tuple(0.5 + 0.25 * index for index in range(model.config.num_experts))
    write_moe_gguf(path, model, "qwen3moe", "MXFP4", factors)
    assert answers(path, runner_loader, make_driver) == expected(model)


def test_a_folder_in_mxfp4_gives_the_answers_of_its_values(
    tmp_path: Path, backend: str, runner_loader: Loader, make_driver: Drivers
) -> None:
    model = make("gpt-oss")
    write_mxfp4(tmp_path / "model", model)
    assert answers(tmp_path / "model", runner_loader, make_driver, backend=backend) == expected(model)
    assert load_model_spec(tmp_path / "model").num_parameters == model.num_parameters()


def test_the_memory_of_a_folder_in_mxfp4_is_known_from_its_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_mxfp4(folder, make("gpt-oss"))
    config, spec = EngineConfig(model=str(folder)), load_model_spec(folder)
    sizes = [each(config, folder, spec) for each in (sizes_on_gpu, sizes_here)]
    outline(folder)
    outlined = load_spec_without_weights(folder)
    assert [each(config, folder, outlined) for each in (sizes_on_gpu, sizes_here)] == sizes


@pytest.mark.parametrize(
    ("part", "change"),
    [("scales", None), ("scales", lambda tensor: tensor[:, :, :1]), ("blocks", lambda tensor: tensor.float())],
)
def test_a_damaged_pair_of_mxfp4_tensors_is_named(
    part: str, change: Any, tmp_path: Path, runner_loader: Loader
) -> None:
    write_mxfp4(tmp_path / "model", make("gpt-oss"))
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    stored = tensors.pop(f"model.layers.1.mlp.experts.down_proj_{part}")
    if change is not None:
        tensors[f"model.layers.1.mlp.experts.down_proj_{part}"] = change(stored).contiguous()
    save_file(tensors, path)
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.experts\..*down_proj"):
        runner_loader(tmp_path / "model")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_give_the_answers_of_the_torch_backend(
    quantization: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    make("qwen2moe").save_pretrained(tmp_path)
    runs = [
        answers(tmp_path, runner_loader, make_driver, backend=backend, quantization=quantization)
        for backend in ("cpu_native", "cpu")
    ]
    assert runs[0] == runs[1]


def test_a_folder_with_a_missing_expert_is_refused(tmp_path: Path, runner_loader: Loader) -> None:
    make("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, path)
    with pytest.raises(LoadError, match=r"layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight"):
        runner_loader(tmp_path)


def test_more_experts_per_token_than_experts_are_refused(tmp_path: Path, runner_loader: Loader) -> None:
    make("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 6}))
    with pytest.raises(LoadError, match=r"num_experts_per_tok.*at most the 5 experts"):
        runner_loader(tmp_path)


def test_active_parameters_exclude_the_experts_that_a_token_does_not_use(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    spec = load_model_spec(tmp_path)
    assert spec.num_parameters - spec.num_read_parameters() == 2 * (5 - 2) * 3 * 64 * 96
    assert spec.num_read_parameters() < spec.num_read_parameters(4) < spec.num_read_parameters(200)
    assert spec.num_read_parameters(200) == spec.num_parameters


def write_modules(folder: Path, model: Any, *, apart: bool) -> None:
    """Write the tensors under the names of transformers 5's modules; `apart`: each expert's matrices by themselves."""
    stored = {}
    for name, tensor in model.state_dict().items():
        if not apart or ".experts." not in name:
            stored[name] = tensor.clone()
            continue
        base, _, part = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for index, each in enumerate(tensor):
            for own, values in zip(parts, each.chunk(len(parts)), strict=True):
                stored[f"{base}.{index}.{own}.weight"] = values.contiguous()
    save_file(stored, folder / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "qwen3moe"])
def test_experts_under_the_names_of_modules_are_read(
    architecture: str, apart: bool, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    model = make(architecture)
    write_modules(tmp_path, model, apart=apart)
    assert answers(tmp_path, runner_loader, make_driver) == expected(model)

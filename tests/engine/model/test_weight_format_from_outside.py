"""The weight format of docs/how-to/serve-a-hugging-face-model.md works as a package of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from greedy_families import greedy_reference
from outlines import outline
from packages import install_package
from safetensors.torch import save_file

from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.sizing import sizes_here
from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import open_weights, stored_as
from pagemill_models.sources import SourceError
from pagemill_models.spec.model_files import load_model_spec, load_spec_without_weights
from pagemill_models.spec.spec_from_config import check_config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "serve-a-hugging-face-model.md"
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
PROMPT, NUM_TOKENS = [3, 17, 40, 5], 8


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the page's package as an installer does, with two entries that cannot be used."""
    _, section = PAGE.read_text().split("### Add a method")
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ((group, name, target),) = re.findall(r'entry-points\."([^"]+)"\]\n(\w+) = "([^"]+)"', section)
    entries = f"{name} = {target}", "gone = nowhere", "other = rows:details", "gptq = rows"
    install_package(tmp_path / "site", monkeypatch, "rows", code, group, *entries)


def write(folder: Path, method: str = "rows8") -> Any:
    """Write a folder in the page's format; return the model of transformers with the same values."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    stored = {}
    for name, tensor in model.state_dict().items():
        if "proj." not in name:
            stored[name] = tensor.clone()
            continue
        integers = torch.randint(-127, 128, tensor.shape).to(torch.int8)
        scales = torch.rand(tensor.shape[0], 1) * 0.004 + 0.002
        tensor.copy_(integers.float() * scales)
        base = name.removesuffix(".weight")
        stored |= {f"{base}.q": integers, f"{base}.scale": scales}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": method}, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | config))
    return model


def test_a_package_can_add_a_weight_format(
    installed: None, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    folder = tmp_path / "model"
    model = write(folder)
    weights = open_weights(folder)
    assert weights.code_kind("model.layers.0.mlp.down_proj.weight") == CodeKind(8, group_size=96)
    assert stored_as(folder, "") == "rows8 (8-bit rows)"
    (result,) = make_driver(runner_loader(folder, dtype="float32")).greedy([PROMPT], NUM_TOKENS)
    assert result.token_ids == greedy_reference(model, PROMPT, NUM_TOKENS)[0]


def test_the_memory_of_its_models_is_known_from_their_index(installed: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder)
    config, spec = EngineConfig(model=str(folder), dtype="float32"), load_model_spec(folder)
    sizes = sizes_here(config, folder, spec)
    outline(folder)
    outlined = load_spec_without_weights(folder)
    assert outlined == msgspec.structs.replace(spec, weight_bytes=outlined.weight_bytes)
    assert sizes_here(config, folder, outlined) == sizes


def test_without_the_package_the_method_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model")
    with pytest.raises(SourceError, match=r"`rows8`.*not supported; awq, .*mxfp4 are"):
        check_config(tmp_path / "model")


@pytest.mark.parametrize(
    ("method", "message"),
    [("gone", "registered as nowhere, .*No module named 'nowhere'"), ("other", "not the functions of a Format")],
)
def test_an_unusable_format_is_reported_for_the_models_that_need_it(
    installed: None, tmp_path: Path, method: str, message: str
) -> None:
    write(tmp_path / "model", method)
    with pytest.raises(LoadError, match=message):
        open_weights(tmp_path / "model")


def test_a_package_does_not_replace_a_format_of_the_engine(installed: None, tmp_path: Path) -> None:
    write(tmp_path / "model", "gptq")
    with pytest.raises(LoadError, match="has `bits` None"):
        open_weights(tmp_path / "model")

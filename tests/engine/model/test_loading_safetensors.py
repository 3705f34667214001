"""Hugging Face folders: one file or shards, any float type, and invalid folders."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import write_tiny_llama

from pagemill_execution.weights.digest import StoredTensor, digest_tensors
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_kernels.torch_arrays import from_torch
from pagemill_models.files.safetensors_header import INDEX_FILE, SINGLE_FILE
from pagemill_models.spec.model_files import load_model_spec

Loader = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path, max_position_embeddings=128, initializer_range=0.02)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def test_shards_give_the_same_tensors_as_one_file(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    whole = SafetensorsFolder(folder)
    digest = whole.digest()
    names = sorted(tensors)
    (folder / SINGLE_FILE).unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))

    sharded = SafetensorsFolder(folder)
    assert sharded.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert sharded.digest() == digest
    out = torch.empty(tensors[names[1]].shape)
    sharded.read_into(names[1], out.numpy())
    assert torch.equal(out, tensors[names[1]])


def test_the_digest_names_types_like_earlier_versions(tmp_path: Path) -> None:
    """Earlier versions used torch's names, and cached blocks of their engines must keep their digests."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.bool)
    tensors = {f"t{at}": torch.randn(3, 5).to(dtype) for at, dtype in enumerate((*dtypes, torch.uint8, torch.int64))}
    save_file(tensors, tmp_path / SINGLE_FILE)
    stored = (StoredTensor(name, str(tensor.dtype), tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy())
              for name, tensor in tensors.items())  # fmt: skip
    assert SafetensorsFolder(tmp_path).digest() == digest_tensors(stored, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_types_are_converted(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    stored = load_file(folder / SINGLE_FILE)
    for wanted in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(64, 32, dtype=wanted)
        SafetensorsFolder(folder).read_into("model.embed_tokens.weight", from_torch(out))
        assert torch.equal(out, stored["model.embed_tokens.weight"].to(wanted))


def test_a_loaded_model_reports_its_digest_and_size(folder: Path, runner_loader: Loader) -> None:
    info = runner_loader(folder, max_model_len=64).info
    assert info.weights_digest == SafetensorsFolder(folder).digest()
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert (info.vocab_size, info.max_model_len, info.kv_dtype) == (64, 64, "float32")


def test_missing_and_unexpected_tensors_are_named_together(folder: Path, runner_loader: Loader) -> None:
    rewrite(folder, lambda tensors: tensors.update(stray=tensors.pop("model.norm.weight")))
    with pytest.raises(LoadError, match=r"missing: `model.norm.weight`; unexpected: `stray`") as error:
        runner_loader(folder, max_model_len=None)
    assert error.value.reason == "ModelUnreadable"


def test_a_configuration_with_more_layers_than_the_files_is_refused_before_a_model_is_built(
    folder: Path, runner_loader: Loader
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 100}))
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()
        with pytest.raises(
            LoadError, match=r"asks for 100 layers \(missing: `model.layers.\d+`.* and \d+ more"
        ) as error:
            runner_loader(folder)
        took_s.append(time.thread_time() - started_s)
    assert error.value.reason == "ModelUnreadable"
    assert min(took_s) < 1.0, "building a model of 4096 layers would take seconds"


def test_integer_weights_are_refused(folder: Path, runner_loader: Loader) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))
    with pytest.raises(LoadError, match=r"`model.norm.weight` has type I32"):
        runner_loader(folder, max_model_len=None)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "remove"])
def test_damaged_weights_are_refused(folder: Path, runner_loader: Loader, damage: str) -> None:
    file = folder / SINGLE_FILE
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"\xff" * 100)
    with pytest.raises(LoadError) as error:
        runner_loader(folder)
    assert error.value.reason == "ModelUnreadable"


@pytest.mark.parametrize("index", [{"weight_map": {"model.norm.weight": "../outside.safetensors"}}, [], {"x": 1}])
def test_an_invalid_index_is_refused(folder: Path, index: Any) -> None:
    (folder / SINGLE_FILE).rename(folder / "a.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(LoadError) as error:
        SafetensorsFolder(folder)
    assert error.value.reason == "ModelUnreadable"


def test_an_index_with_more_tensors_than_the_shards_is_refused(folder: Path) -> None:
    names = [*load_file(folder / SINGLE_FILE), "absent.weight"]
    (folder / SINGLE_FILE).rename(folder / "a.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    with pytest.raises(LoadError, match=r"absent\.weight"):
        SafetensorsFolder(folder)


def test_with_one_file_and_an_index_sizes_and_weights_come_from_the_same_files(folder: Path) -> None:
    save_file({"stray.weight": torch.ones(3)}, folder / "old.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"stray.weight": "old.safetensors"}}))
    weights = SafetensorsFolder(folder)
    assert "stray.weight" not in weights.shapes
    assert load_model_spec(folder).weight_bytes == weights.num_bytes("float32", keep_stored=False)


@pytest.mark.parametrize("method", ["hqq", "quanto"])
def test_a_quantized_folder_is_refused_with_a_remedy(folder: Path, runner_loader: Loader, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(LoadError, match=rf"quantized by `{method}`.*GGUF") as error:
        runner_loader(folder)
    assert error.value.reason == "UnsupportedQuantization"


def test_an_error_for_a_context_larger_than_the_kv_cache_names_both(folder: Path, runner_loader: Loader) -> None:
    with pytest.raises(LoadError, match=r"maxModelLen is 100, but the KV cache holds 64 tokens") as error:
        runner_loader(folder, max_model_len=100, num_kv_blocks=4)
    assert error.value.reason == "MaxModelLenTooLarge"


def test_a_context_larger_than_the_model_is_refused(folder: Path, runner_loader: Loader) -> None:
    with pytest.raises(LoadError, match=r"maxModelLen is 4096, but the model was made for 128 tokens"):
        runner_loader(folder, max_model_len=4096)


def test_the_cache_size_is_derived_from_the_memory(folder: Path, runner_loader: Loader) -> None:
    runner = runner_loader(folder, num_kv_blocks=None, kv_cache_memory_bytes=10 * 256 * 16 + 5, max_model_len=None)
    assert runner.info.num_blocks == 10
    assert runner.info.max_model_len == 128


def test_a_cache_too_small_for_one_block_is_refused(folder: Path, runner_loader: Loader) -> None:
    with pytest.raises(LoadError) as error:
        runner_loader(folder, num_kv_blocks=None, kv_cache_memory_bytes=100)
    assert error.value.reason == "KVCacheTooSmall"


def test_a_cache_larger_than_any_machines_memory_is_refused(folder: Path, runner_loader: Loader) -> None:
    with pytest.raises(LoadError, match="Lower kvCacheMemory") as error:
        runner_loader(folder, num_kv_blocks=None, kv_cache_memory_bytes=1 << 60, max_model_len=None)
    assert error.value.reason == "KVCacheTooLarge"


def test_a_cache_larger_than_the_containers_memory_is_refused(
    folder: Path, runner_loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_execution.runners.kv_cache.memory_limit", lambda: 20 * 256 * 16)
    assert runner_loader(folder, num_kv_blocks=20, max_model_len=None).info.num_blocks == 20
    with pytest.raises(LoadError) as error:
        runner_loader(folder, num_kv_blocks=21, max_model_len=None)
    assert error.value.reason == "KVCacheTooLarge"


def test_a_model_larger_than_memory_is_refused(
    folder: Path, runner_loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000, "total": 2000})())
    with pytest.raises(LoadError) as error:
        runner_loader(folder)
    assert error.value.reason == "ModelTooLarge"

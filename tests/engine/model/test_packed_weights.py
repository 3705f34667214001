"""Quantized checkpoints of other projects: their values, their form in memory, and refusals.

`packed_by_others.json` contains small matrices written by AutoAWQ 0.2.9, AutoGPTQ 0.7.1, compressed-tensors 0.20.0,
bitsandbytes 0.50.2 and transformers 5.23.0 (FP8 in blocks), with the integers, scales and zeros that they were given,
or the values that they read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cut_weights import Uncut, float_values, noted_reads
from greedy_families import greedy_reference
from outlines import outline
from packed_models import MODELS, write
from packed_records import RECORDS, Folder, tensors_of
from ranked_engine import LONG, Engine, Ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill_engine.config import EngineConfig
from pagemill_execution.decoders.errors import WeightsError
from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.sizing.rank_parts import part_of
from pagemill_execution.sizing.sizing import sizes_here, sizes_on_gpu, weights_of
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import open_weights
from pagemill_execution.weights.packed.formats import BUILT_IN
from pagemill_execution.weights.packed.matrix import PackedMatrix
from pagemill_kernels.torch_arrays import to_torch
from pagemill_models.declaration.quantization_settings import read_quantizations
from pagemill_models.spec.model_files import load_model_spec, load_spec_without_weights

NUM_TOKENS = 12
PROMPTS: list[list[int]] = [[3 + 7 * at % 120 for at in range(length)] for length in (1, 5, 40)]


def matrix_of(settings: dict[str, Any], tensors: dict[str, Tensor]) -> PackedMatrix:
    named = {f"m.{name}": tensor for name, tensor in tensors.items()}
    found = BUILT_IN[settings["quant_method"]].matrices(settings, Folder(named))
    assert set(found) == {"m.weight"}
    assert set(found["m.weight"].parts) == set(named), "every stored tensor must be used"
    return found["m.weight"]


def values_of(record: dict[str, Any]) -> Tensor:
    if "values" in record:
        return torch.tensor(record["values"])
    scales, zeros = torch.tensor(record["scales"]), torch.tensor(record["zeros"])
    rows = record["integers"]
    in_features = record.get("group_of") and len(record["group_of"])
    digits = len(rows[0]) // (in_features or 64)
    integers = torch.tensor([[int(row[at : at + digits], 16) for at in range(0, len(row), digits)] for row in rows])
    if record["settings"]["quant_method"] == "compressed-tensors":
        half = 16**digits // 2
        integers = (integers + half) % (2 * half) - half
    group_of = torch.tensor(record.get("group_of") or [at // 32 for at in range(integers.shape[1])])
    return (integers - zeros[:, group_of]) * scales[:, group_of]


@pytest.mark.parametrize("name", RECORDS)
def test_matrices_packed_by_others_have_the_values_that_they_were_given(name: str) -> None:
    record = RECORDS[name]
    matrix = matrix_of(record["settings"], tensors_of(record))
    wanted = values_of(record)
    assert matrix.shape == tuple(wanted.shape)
    torch.testing.assert_close(to_torch(matrix.floats()), wanted, rtol=1e-6, atol=1e-6)
    if matrix.codes is not None:
        torch.testing.assert_close(to_torch(matrix.codes().dequantize()), wanted, rtol=1e-6, atol=1e-6)


KINDS = {
    "awq": CodeKind(4, has_offsets=True),
    "gptq": CodeKind(4, has_offsets=True),
    "gptq act-order": CodeKind(4, has_offsets=True),
    "gptq 8 bits": CodeKind(8, has_offsets=True),
    "compressed-tensors w4a16": CodeKind(4, has_offsets=True),
    "compressed-tensors w4a16 asymmetric": CodeKind(4, has_offsets=True),
    "compressed-tensors w8a16": CodeKind(8),
    "compressed-tensors int8 channels": CodeKind(8, group_size=64),
    "compressed-tensors fp8 channels": CodeKind(8, group_size=64, is_float=True),
    "compressed-tensors fp8 tensor": CodeKind(8, group_size=64, is_float=True),
    "compressed-tensors fp8 blocks": CodeKind(8, group_size=32, is_float=True),
    "compressed-tensors nvfp4": CodeKind(8, group_size=16),
    "fp8 blocks": CodeKind(8, group_size=32, is_float=True),
    "fp8 blocks, powers of two": CodeKind(8, group_size=32, is_float=True),
    "bitsandbytes nf4": CodeKind(4, group_size=64, is_float=True),
    "bitsandbytes nf4 double": CodeKind(4, group_size=64, is_float=True),
    "bitsandbytes fp4": CodeKind(4, group_size=64, is_float=True),
}


@pytest.mark.parametrize("name", RECORDS)
def test_groups_of_consecutive_integers_stay_quantized_and_others_become_floats(name: str) -> None:
    record = RECORDS[name]
    assert matrix_of(record["settings"], tensors_of(record)).kind == KINDS[name]


def test_every_documented_method_has_a_sample() -> None:
    assert {*BUILT_IN, "mxfp4"} == set(read_quantizations())


# -- whole models --------------------------------------------------------------------------------------------------


def expected(model: Any) -> list[list[int]]:
    return [greedy_reference(model, list(prompt), NUM_TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_checkpoint_gives_the_answers_of_its_values(
    name: str, tmp_path: Path, backend: str, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    model = write(tmp_path / "model", name)
    runner = runner_loader(tmp_path / "model", backend=backend, dtype="float32")
    assert [result.token_ids for result in make_driver(runner).greedy(PROMPTS, NUM_TOKENS)] == expected(model)
    assert load_model_spec(tmp_path / "model").num_parameters == model.num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors fp8"])
def test_ranks_give_the_tokens_of_one_with_a_packed_checkpoint(name: str, tmp_path: Path, ranks: Ranks) -> None:
    model, params = write(tmp_path / "model", name), msgspec.structs.replace(LONG, max_tokens=NUM_TOKENS)
    found = Engine(ranks(tmp_path / "model", 2)).run(PROMPTS, params)
    assert [tokens for tokens, _ in found] == expected(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_its_parts_of_a_packed_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks together read each byte of the matrices once, except runs of values that cross the ends of rows, and
    blocks of 48 outputs that cross those of heads. Groups of columns in an order of their own are refused."""
    folder = tmp_path / "model"
    write(folder, name)
    config, spec = EngineConfig(model=str(folder)), load_model_spec(folder)
    whole, read = weights_of(config, folder, spec, True), noted_reads(monkeypatch)
    packed = [each for each in spec.decoder.shapes() if "proj." in each]
    for each in packed:
        whole.read_codes(each)
    read_by_one, read_by_two = sum(read), 0
    for rank in range(2):
        part = part_of(spec, rank, 2, [(0, spec.num_layers)])
        own, cut = part.weights(whole, spec.decoder), part.weights(Uncut(whole), spec.decoder)  # type: ignore[arg-type]
        assert own.shapes == cut.shapes
        for each in packed:
            read.clear()
            if name == "gptq act-order" and part.slices[each].dimension == 1:
                with pytest.raises(LoadError, match="in an order of its own"):
                    own.read_codes(each)
                continue
            codes = own.read_codes(each)
            read_by_two += sum(read)
            if codes is not None:
                assert np.array_equal(codes.dequantize(), float_values(own, each))
                assert codes.codes.shape == own.shapes[each]
            assert np.array_equal(float_values(own, each), float_values(cut, each)), each
    assert read_by_two < (2.01 if "nf4" in name else {"fp8 blocks": 1.7}.get(name, 1.05)) * read_by_one


def test_settings_of_packed_weights_are_also_read_from_the_file_of_autogptq(tmp_path: Path) -> None:
    write(tmp_path / "model", "gptq act-order")
    path = tmp_path / "model" / "config.json"
    spec, shapes = load_model_spec(path.parent), open_weights(path.parent).shapes
    config = json.loads(path.read_text())
    settings = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"packed.*add it, or AutoGPTQ's quantize_config\.json"):
        check_tensors(spec.decoder.shapes(), open_weights(path.parent).shapes)
    del settings["quant_method"]
    (path.parent / "quantize_config.json").write_text(json.dumps({**settings, "sym": True}))
    assert load_model_spec(path.parent) == spec
    assert open_weights(path.parent).shapes == shapes


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_packed_checkpoint_is_known_from_its_index(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, name)
    config = EngineConfig(model=str(folder), dtype="float32")
    spec = load_model_spec(folder)
    sizes = [each(config, folder, spec) for each in (sizes_on_gpu, sizes_here)]
    outline(folder)
    outlined = load_spec_without_weights(folder)
    assert outlined == msgspec.structs.replace(spec, weight_bytes=outlined.weight_bytes)
    found = [each(config, folder, outlined) for each in (sizes_on_gpu, sizes_here)]
    if name == "gptq dynamic":  # names do not say which matrices have other bits: all count with the most
        assert [each.weight_bytes for each in found] >= [each.weight_bytes for each in sizes]
        return
    assert found == sizes


def test_the_log_says_which_format_was_found_and_what_it_becomes(tmp_path: Path) -> None:
    for name, said in {
        "gptq act-order": "gptq (4 bits, groups of 32, act-order) as 4-bit codes of 6 bits a weight",
        "gptq dynamic": "gptq (4 bits, others by `dynamic`, groups of 32) as ",
        "fp8 tensor": "fp8 (e4m3, activations static: not rounded here) as ",
        "bitsandbytes nf4": "(nf4) as 4-bit floats of 4.5 bits a weight and 4-bit floats of 5 bits a weight",
        "compressed-tensors int8": "compressed-tensors as 8-bit codes of 8.",
    }.items():
        write(tmp_path / name, name)
        phases: dict[str, str] = {}
        config = EngineConfig(model=str(tmp_path / name), num_kv_blocks=8, max_model_len=64, num_threads=1)
        create_runner(config, lambda phase, detail, found=phases: found.setdefault(phase, detail)).close()
        assert said in phases["loading"]
        assert ", other weights as " in phases["loading"]


@pytest.mark.parametrize(
    ("name", "ending", "change", "message"),
    [
        ("awq", "qzeros", None, r"down_proj\.qzeros` is not there; \[3, 8\] is wanted"),
        ("awq", "scales", lambda scales: scales[:, :5], r"down_proj\.scales` has the shape \[3, 5\]; \[3, 64\] is"),
        ("gptq", "scales", lambda scales: scales[:2], r"qzeros` has the shape \[3, 8\]; \[2, 8\] is wanted"),
        ("gptq", "g_idx", lambda index: index[:7], r"g_idx` has the shape \[7\]; \[96\] is wanted"),
        ("gptq act-order", "g_idx", lambda index: index + 1, r"g_idx` names the group 3 of 3"),
        ("fp8 blocks", "weight_scale_inv", lambda scales: scales[:1], r"has the shape \[1, 3\]; \[2, 3\] is wanted"),
        ("bitsandbytes nf4", "weight.absmax", lambda largest: largest[1:], r"has the shape \[95\]; \[96\] is wanted"),
        ("bitsandbytes nf4", "weight.quant_map", lambda table: table[:8], r"quant_map` has the shape \[8\]; \[16\] is"),
        ("compressed-tensors nvfp4", "weight_scale", lambda scales: scales[1:], r"\[63, 6\]; \[64, 6\] is wanted"),
        ("compressed-tensors nvfp4", "weight_global_scale", None, r"weight_global_scale` is not there; \[1\] or \[\]"),
        ("bitsandbytes int8", "SCB", lambda largest: largest[:9], r"SCB` has the shape \[9\]; \[64\] is wanted"),
    ],
)
def test_scales_and_zeros_of_the_wrong_shape_are_named(
    name: str, ending: str, change: Any, message: str, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    write(tmp_path / "model", name)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    stored = tensors.pop(f"model.layers.1.mlp.down_proj.{ending}")
    if change is not None:
        tensors[f"model.layers.1.mlp.down_proj.{ending}"] = change(stored).contiguous()
    save_file(tensors, path)
    with pytest.raises(LoadError, match=message) as error:
        runner_loader(tmp_path / "model")
    assert error.value.reason == "ModelUnreadable"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq", {"bits": 3}, r"`bits` 3 \(4 or 8 is read\)"),
        ("gptq", {"bits": 16}, r"`bits` 16"),
        ("awq", {"version": "gemv"}, r"`version` 'gemv'"),
        ("compressed-tensors int8", {"format": "marlin-24"}, r"`format` 'marlin-24'"),
        ("gptq dynamic", {"bits": 3}, r"`bits` 3"),
        ("fp8 tensor", {"quant_method": "gptq", "bits": 4}, r"gptq and the folder no tensor in that form"),
    ],
)
def test_an_unsupported_format_is_refused_with_a_remedy(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    write(tmp_path / "model", name)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError, match=rf"{message}.*GGUF") as error:
        runner_loader(tmp_path / "model")
    assert error.value.reason == "UnsupportedQuantization"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gptq", "qweight", "is stored as F32; I32 is wanted"),
        ("awq", "qzeros", "is stored as F32; I32 is wanted"),
        ("gptq", "scales", "is stored as I32; F16 or BF16 or F32 or F64 is wanted"),
    ],
)
def test_packed_integers_that_are_stored_as_floats_are_refused_by_name(
    name: str, tensor: str, message: str, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    folder = tmp_path / "model"
    write(folder, name)
    stored = load_file(folder / "model.safetensors")
    other = torch.int32 if tensor == "scales" else torch.float32
    changed = {key: each.to(other) if key.endswith(tensor) else each for key, each in stored.items()}
    save_file(changed, folder / "model.safetensors")
    with pytest.raises(LoadError, match=message) as error:
        runner_loader(folder)
    assert error.value.reason == "ModelUnreadable"
    assert f".{tensor}`" in error.value.message

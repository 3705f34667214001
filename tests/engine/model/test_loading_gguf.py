"""GGUF weights: dequantization equal to the `gguf` package, names, order of rows, and damaged files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_model import HALVES

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.weights.codes import CODE_KINDS, read_blocks, read_codes
from pagemill_execution.weights.dequantize import dequantize_into, supported_types
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.gguf_weights import GGUFWeights
from pagemill_execution.weights.opening import open_weights
from pagemill_kernels import torch_ops as native
from pagemill_kernels.cpu import library
from pagemill_kernels.linear import groups
from pagemill_kernels.torch_arrays import from_torch
from pagemill_models.declaration.registry import find_gguf_family


def random_bytes(kind: str, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return arbitrary stored bytes: every bit pattern of quantized values, and finite half-precision scales."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(3)
    data = generator.integers(0, 256, (rows, columns // block_elements, block_bytes), dtype=np.uint8)
    halves = HALVES.get(kind, [0])
    for offset in halves:
        values = generator.normal(0, 1, data.shape[:2]).astype(np.float16)
        data[..., offset : offset + 2] = values[..., None].view(np.uint8).reshape(*data.shape[:2], 2)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", [kind for kind in supported_types() if kind.startswith(("Q", "IQ"))])
def test_dequantized_values_equal_the_gguf_package(kind: str) -> None:
    data = random_bytes(kind, 5, 512)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    out = np.empty((5, 512), dtype=np.float32)
    dequantize_into(kind, data.reshape(-1), out)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_quantized_weights_equal_the_dequantized_values(kind: str) -> None:
    data = random_bytes(kind, 5, 512).reshape(-1)
    expected = np.empty((5, 512), dtype=np.float32)
    dequantize_into(kind, data, expected)
    codes = read_codes(kind, data, (5, 512))
    expected_kind = CODE_KINDS[kind]
    assert (codes.bits, codes.group_size, codes.offsets is not None, codes.is_float) == expected_kind
    assert codes.codes.shape == (5, 512)
    np.testing.assert_allclose(codes.dequantize(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
@pytest.mark.parametrize("kinds", [("Q4_0",), ("Q4_1",), ("Q8_0",), ("Q4_1", "Q4_1", "Q4_1"), ("Q8_0", "Q8_0")])
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("for_dots", [False, True])
def test_packed_blocks_equal_the_packed_values_taken_out_of_them(
    kinds: tuple[str, ...], rows: int, for_dots: bool
) -> None:
    stored = [random_bytes(kind, rows, 512).reshape(-1) for kind in kinds]
    shape = (rows, 512)
    blocks = [read_blocks(kind, data, shape) for kind, data in zip(kinds, stored, strict=True)]
    codes = [read_codes(kind, data, shape) for kind, data in zip(kinds, stored, strict=True)]
    whole = groups.stack_blocks([block for block in blocks if block is not None])
    assert whole is not None
    bias = torch.randn(rows * len(kinds))
    pack_blocks = native.pack_blocks_for_dots if for_dots else native.pack_blocks
    pack_codes = native.pack_codes_for_dots if for_dots else native.pack_codes
    packed, others = pack_blocks(whole, bias), pack_codes(groups.stack(codes), bias)
    one, other = packed.native, others.native
    assert np.array_equal(one._codes, other._codes)
    assert one._scales is not None
    assert other._scales is not None
    assert np.array_equal(one._scales, other._scales)
    assert (one._weight.format, one._weight.group, one._weight.has_offsets) == (
        other._weight.format, other._weight.group, other._weight.has_offsets,
    )  # fmt: skip
    x = torch.randn(3, 512)
    assert torch.equal(packed(x), others(x))


def test_blocks_of_several_or_other_types_are_taken_apart() -> None:
    parts = [read_blocks(kind, random_bytes(kind, 2, 512).reshape(-1), (2, 512)) for kind in
             ("Q4_0", "Q4_1")]  # fmt: skip
    assert groups.stack_blocks([part for part in parts if part is not None]) is None
    for kind in CODE_KINDS.keys() - {"Q4_0", "Q4_1", "Q8_0"}:
        assert read_blocks(kind, random_bytes(kind, 2, 512).reshape(-1), (2, 512)) is None


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_float_types_are_converted(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 64).to(dtype)
    for wanted in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(3, 64, dtype=wanted)
        dequantize_into(kind, values.view(torch.uint8).flatten().numpy(), from_torch(out))
        assert torch.equal(out, values.to(wanted))


def test_large_tensors_are_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes("Q4_K", 17, 512).reshape(-1)
    whole, pieces = np.zeros((17, 512), dtype=np.float32), np.zeros((17, 512), dtype=np.float32)
    dequantize_into("Q4_K", data, whole)
    codes = read_codes("Q4_K", data, (17, 512))
    monkeypatch.setattr("pagemill_kernels.pieces.PIECE_ELEMENTS", 1024)
    dequantize_into("Q4_K", data, pieces)
    assert np.array_equal(whole, pieces)
    assert np.array_equal(read_codes("Q4_K", data, (17, 512)).dequantize(), codes.dequantize())


def test_the_early_digest_equals_that_of_the_loader(smollm2_path: Path, tmp_path: Path) -> None:
    early = EarlyDigest(lambda: smollm2_path)
    digest = open_weights(smollm2_path).digest()
    assert early.of(smollm2_path) == digest
    assert early.of(tmp_path / "another.gguf") is None
    assert open_weights(smollm2_path, early).digest() == digest


@pytest.mark.parametrize("name", ["absent.gguf", "damaged.gguf", "."])
def test_without_an_early_digest_the_loader_provides_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUFxxxx")
    assert EarlyDigest(lambda: tmp_path / name).of(tmp_path / name) is None


def test_names_are_translated_to_those_of_hugging_face() -> None:
    names = find_gguf_family("llama", Path("m.gguf")).family.gguf_names
    assert names is not None
    assert names.hugging_face_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    assert names.hugging_face_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert names.hugging_face_name("output.weight") == "lm_head.weight"
    assert names.hugging_face_name("blk.0.ffn_strange.weight") == "blk.0.ffn_strange.weight"
    in_layer = "model.layers.0.block_sparse_moe.experts"
    assert names.hugging_face_name("blk.0.ffn_gate_exps.weight") == f"{in_layer}.*.w1.weight"


def llama_file(
    path: Path, kind: str = "llama", num_kv_heads: int | list[int] = 2, **changes: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a GGUF file of one layer; return the written tensors.

    `changes` replaces tensors, or leaves them out if None.
    """
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (64, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (48, 32),
        "blk.0.ffn_up.weight": (48, 32),
        "blk.0.ffn_down.weight": (32, 48),
    }
    tensors: dict[str, Any] = {n: generator.normal(0, 1, shape).astype(np.float32) for n, shape in shapes.items()}
    tensors.update({name.replace("__", "."): value for name, value in changes.items()})
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def read(path: Path, name: str) -> torch.Tensor:
    weights = open_weights(path)
    out = torch.empty(weights.shapes[name])
    weights.read_into(name, from_torch(out))
    return out


def test_llamas_query_rows_are_restored_to_half_order(tmp_path: Path) -> None:
    tensors = llama_file(tmp_path / "m.gguf")
    stored = torch.from_numpy(tensors["blk.0.attn_q.weight"])
    # Head 1 has rows 8 to 15; its rows are pairs (i, i + half).
    query = read(tmp_path / "m.gguf", "model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(query[8:16], stored[[8, 10, 12, 14, 9, 11, 13, 15]])
    value = read(tmp_path / "m.gguf", "model.layers.0.self_attn.v_proj.weight")
    assert torch.equal(value, torch.from_numpy(tensors["blk.0.attn_v.weight"]))


def test_equal_head_counts_by_layer_count_as_one(tmp_path: Path) -> None:
    stored = torch.from_numpy(llama_file(tmp_path / "m.gguf", num_kv_heads=[2])["blk.0.attn_k.weight"])
    key = read(tmp_path / "m.gguf", "model.layers.0.self_attn.k_proj.weight")
    assert torch.equal(key[8:16], stored[[8, 10, 12, 14, 9, 11, 13, 15]])


def test_rows_of_other_architectures_are_unchanged(tmp_path: Path) -> None:
    tensors = llama_file(tmp_path / "m.gguf", kind="qwen3")
    query = read(tmp_path / "m.gguf", "model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(query, torch.from_numpy(tensors["blk.0.attn_q.weight"]))


def test_the_digest_depends_on_the_content(tmp_path: Path) -> None:
    llama_file(tmp_path / "a.gguf")
    llama_file(tmp_path / "same.gguf")
    llama_file(tmp_path / "b.gguf", output_norm__weight=np.ones(32, dtype=np.float32))
    digests = [open_weights(tmp_path / name).digest() for name in ("a.gguf", "same.gguf", "b.gguf")]
    assert digests[0] == digests[1] != digests[2]


def test_sampled_digests_cover_the_ends_and_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagemill_execution.weights import digest

    monkeypatch.setattr(digest, "WHOLE_MODEL_BYTES", 0)
    data = np.zeros(digest.WHOLE_TENSOR_BYTES * 2, dtype=np.uint8)

    def of(changed: int | None) -> str:
        copy = data.copy()
        if changed is not None:
            copy[changed] = 1
        return digest.digest_tensors([digest.StoredTensor("t", "U8", copy.shape, copy)], copy.nbytes)

    assert len({of(None), of(0), of(len(data) // 2), of(len(data) - 1)}) == 4


Loader = Callable[..., Any]


def test_a_file_with_a_missing_tensor_is_refused_by_name(tmp_path: Path, runner_loader: Loader) -> None:
    llama_file(tmp_path / "m.gguf", blk__0__ffn_up__weight=None)
    with pytest.raises(LoadError, match=r"missing: `model.layers.0.mlp.up_proj.weight`") as error:
        runner_loader(tmp_path / "m.gguf", max_model_len=64)
    assert error.value.reason == "ModelUnreadable"


def test_a_file_with_an_unexpected_tensor_is_refused_by_name(tmp_path: Path, runner_loader: Loader) -> None:
    llama_file(tmp_path / "m.gguf", blk__0__extra__weight=np.ones(32, dtype=np.float32))
    with pytest.raises(LoadError, match=r"unexpected: `blk.0.extra.weight`"):
        runner_loader(tmp_path / "m.gguf", max_model_len=64)


def test_a_tensor_of_the_wrong_shape_is_refused_by_name(tmp_path: Path, runner_loader: Loader) -> None:
    llama_file(tmp_path / "m.gguf", blk__0__ffn_up__weight=np.ones((40, 32), dtype=np.float32))
    with pytest.raises(LoadError, match=r"up_proj.weight` has the shape \[40, 32\]"):
        runner_loader(tmp_path / "m.gguf", max_model_len=64)


def test_an_unsupported_storage_type_is_refused_by_name(tmp_path: Path) -> None:
    llama_file(tmp_path / "m.gguf", output_norm__weight=np.ones(32, dtype=np.int8))
    with pytest.raises(LoadError, match=r"`output_norm.weight` is stored as I8") as error:
        GGUFWeights(tmp_path / "m.gguf")
    assert error.value.reason == "UnsupportedQuantization"


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, runner_loader: Loader, keep: int) -> None:
    llama_file(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:keep] if keep >= 0 else content[: len(content) - 4000])
    with pytest.raises(LoadError) as error:
        runner_loader(tmp_path / "cut.gguf", max_model_len=64)
    assert error.value.reason == "ModelUnreadable"


@pytest.mark.parametrize(
    ("kind", "message"), [("mamba", "mamba"), ("clip", "`clip`"), ("jamba", "`jamba` with layers .* recurrent state")]
)
def test_an_unknown_architecture_is_refused(kind: str, message: str, tmp_path: Path, runner_loader: Loader) -> None:
    llama_file(tmp_path / "m.gguf", kind=kind)
    with pytest.raises(LoadError, match=message) as error:
        runner_loader(tmp_path / "m.gguf")
    assert error.value.reason == "UnsupportedArchitecture"


def test_a_missing_file_is_refused(tmp_path: Path, runner_loader: Loader) -> None:
    with pytest.raises(LoadError) as error:
        runner_loader(tmp_path / "absent.gguf")
    assert error.value.reason == "ModelNotFound"


@pytest.mark.model
@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
def test_the_embedded_model_stays_quantized(smollm2_runner: Any, smollm2_path: Path) -> None:
    """4-bit weights take 6 bits with their scales, 8-bit ones 9; a tied embedding is in memory once."""
    assert isinstance(smollm2_runner.model, NativeDecoder)
    quantized = smollm2_runner.info.weight_bytes
    assert quantized < 1.35 * smollm2_path.stat().st_size
    planned = open_weights(smollm2_path).num_bytes("float32", keep_stored=True)
    assert quantized == pytest.approx(planned, rel=0.001)
    assert open_weights(smollm2_path).num_bytes("float32", keep_stored=False) > 4 * quantized

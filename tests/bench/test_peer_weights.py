"""Equal weights in every peer's format: the written values are those that were read, rounded to bfloat16 once."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from peers import weights

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_execution.weights.opening import open_weights
from pagemill_kernels.torch_arrays import from_torch
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.tokenizer_files.load_bundle import load_bundle

BF16 = gguf.GGMLQuantizationType.BF16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a file of one matrix and one norm."""
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "b"])
    values = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.ffn_up.weight", quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0"])
def test_a_larger_gguf_file_has_the_same_values(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / f"target.{kind}.gguf"
    weights.write_gguf(source, target, kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    stored = {tensor.name: tensor for tensor in after.tensors}
    matrix, norm = stored["blk.0.ffn_up.weight"], stored["output_norm.weight"]
    assert (matrix.tensor_type.name, norm.tensor_type.name) == (kind.upper(), "F32")
    original = dequantize(before.tensors[0].data, before.tensors[0].tensor_type)
    rounded = dequantize(quantize(original, BF16), BF16)
    exact = dequantize(matrix.data, matrix.tensor_type)
    assert np.abs(exact - rounded).max() <= (np.abs(rounded).max() / 127 if kind == "q8_0" else 0)
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]


@pytest.mark.full
@pytest.mark.model
def test_the_folder_is_the_embedded_model_in_bfloat16(tmp_path: Path) -> None:
    source, folder = resolve_source(weights.MODEL), tmp_path / "model"
    weights.write_folder(source, folder)
    stored, original = open_weights(folder), open_weights(source)
    assert stored.shapes == original.shapes
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        ours = torch.empty(stored.shapes[name], dtype=torch.bfloat16)
        theirs = torch.empty_like(ours)
        stored.read_into(name, from_torch(ours))
        original.read_into(name, from_torch(theirs))
        assert torch.equal(ours, theirs)
    spec, wanted = load_model_spec(folder), load_model_spec(source)
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings"):
        assert getattr(spec, field) == getattr(wanted, field)
    assert spec.decoder.ropes() == wanted.decoder.ropes()
    text = "Page tables map 4,096 bytes each.\n"
    one, other = (Tokenizer(load_bundle(path)) for path in (folder, source))
    assert one.encode(text) == other.encode(text)
    assert load_bundle(folder).chat_template == load_bundle(source).chat_template
    one.close()
    other.close()

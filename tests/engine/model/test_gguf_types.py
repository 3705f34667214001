"""A model of each GGUF storage type gives the answers of transformers on the values read by the `gguf` package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import iq_grids
import numpy as np
import pytest
import torch
import transformers
from gguf_model import DRAWN, stored_blocks, write_gguf
from greedy_families import greedy_reference

from pagemill_engine.config import EngineConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.codes import read_codes
from pagemill_execution.weights.dequantize import SCALED, _vectors, supported_types
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.gguf_weights import GGUFWeights
from pagemill_kernels.cpu import library
from pagemill_models.files.ggml_types import GGMLType

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "models.md"
NUM_TOKENS = 8
PROMPTS: list[list[int]] = [[3 + 7 * at % 120 for at in range(length)] for length in (1, 5, 40)]


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def take_stored_values(model: Any, kind: str, factor: float = 1.0) -> None:
    """Replace the model's matrices by the values that the file stores, times a factor."""
    storage = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                continue
            if kind == "F64":
                tensor.mul_(factor)
                continue
            if kind.startswith(DRAWN):
                data = stored_blocks(kind, name, tensor.shape)
            else:
                data = gguf.quants.quantize(tensor.numpy(), storage)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, storage)).view(tensor.shape) * factor)


SAMPLED = [kind for kind in supported_types() if kind not in SCALED or kind == "IQ2_XS"]
"""Types whose models run in each test run: those of `SCALED` differ in how they are read only."""


@pytest.mark.parametrize(
    "kind", [kind if kind in SAMPLED else pytest.param(kind, marks=pytest.mark.full) for kind in supported_types()]
)
def test_answers_equal_those_of_the_dequantized_weights(
    tmp_path: Path, kind: str, backend: str, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    reference = llama()
    write_gguf(tmp_path / "model.gguf", reference, {"": kind})
    take_stored_values(reference, kind)
    results = make_driver(runner_loader(tmp_path / "model.gguf", backend=backend)).greedy(PROMPTS, NUM_TOKENS)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.error is None
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
        rows = logits.log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(result.token_ids)[:, None]).squeeze(1)
        assert result.logprobs == pytest.approx(chosen.tolist(), abs=2e-3)
        assert (rows.amax(-1) - chosen).max() < 2e-3, "another token was clearly more likely"


@pytest.mark.parametrize("kind", ["NVFP4", "Q8_0", "F32"])
def test_a_factor_beside_a_matrix_multiplies_its_values(
    kind: str, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    reference = llama()
    write_gguf(tmp_path / "model.gguf", reference, {"": kind}, factor=1.5)
    take_stored_values(reference, kind, 1.5)
    results = make_driver(runner_loader(tmp_path / "model.gguf")).greedy(PROMPTS, NUM_TOKENS)
    assert [result.token_ids for result in results] == [
        greedy_reference(reference, each, NUM_TOKENS)[0] for each in PROMPTS
    ]


def test_a_factor_of_another_form_is_refused_by_its_name(tmp_path: Path) -> None:
    model = llama()
    write_gguf(tmp_path / "model.gguf", model, {"": "NVFP4"}, factor=1.5)
    weights = GGUFWeights(tmp_path / "model.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    factor = weights._file.tensors["blk.0.ffn_up.scale"]
    weights._file.tensors["blk.0.ffn_up.scale"] = factor._replace(shape=(3,), num_bytes=12)
    with pytest.raises(LoadError, match=r"`blk.0.ffn_up.scale` is F32 \[3\]"):
        weights.read_codes(name)


@pytest.mark.parametrize("kind", iq_grids.KINDS)
def test_the_grids_are_those_of_the_format(kind: str) -> None:
    assert np.array_equal(_vectors(kind), iq_grids.grid_of(kind))


@pytest.mark.parametrize("kind", SCALED)
def test_codes_of_any_bytes_are_the_values_of_the_format(kind: str) -> None:
    blocks = stored_blocks(kind, kind, (6, 512))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(read_codes(kind, blocks.reshape(-1), (6, 512)).dequantize(), expected)


def test_the_page_lists_exactly_the_types_that_are_read() -> None:
    (listed,) = re.findall(r"\*\*GGUF types\*\*: ([^.]+)\.", PAGE.read_text())
    assert sorted(re.findall(r"[A-Z]\w+", listed)) == sorted(supported_types())


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if kind.name not in supported_types()])
def test_all_other_types_of_the_format_are_refused_by_name_before_weights_are_read(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for add in (writer.add_block_count, writer.add_head_count, writer.add_feed_forward_length):
        add(1)
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_vocab_size):
        add(256)
    writer.add_layer_norm_rms_eps(1e-6)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.zeros((256, 256 // elements * num_bytes), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError) as refused:
        create_runner(EngineConfig(model=str(tmp_path / "model.gguf")), lambda phase, detail: None)
    named = kind.name if kind.name in GGMLType.__members__ else f"unknown storage type {kind.value}"
    assert "`token_embd.weight`" in refused.value.message
    assert named in refused.value.message


@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
@pytest.mark.parametrize(("kind", "said"), [("Q2_K", "8-bit codes of 12 bits"), ("IQ4_XS", "8-bit codes of 9 bits")])
def test_the_log_says_what_a_type_becomes_in_memory(tmp_path: Path, kind: str, said: str) -> None:
    write_gguf(tmp_path / "model.gguf", llama(), {"": kind})
    progress: list[str] = []
    settings = EngineConfig(model=str(tmp_path / "model.gguf"), num_kv_blocks=32, max_model_len=64)
    runner = create_runner(settings, lambda phase, detail: progress.append(detail))
    runner.close()
    assert f"{kind} as {said} a weight" in progress[0]

"""`quantization`: weights of any file format are quantized while they are loaded; stored ones of few bits are kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf_model import write_gguf

from pagemill_execution.weights.opening import open_weights
from pagemill_execution.weights.quantized import QuantizedWeights
from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import library
from pagemill_kernels.linear.quantize import quantize
from pagemill_kernels.torch_arrays import from_torch, to_torch
from pagemill_models.spec.model_files import load_model_spec

Loader = Callable[..., Any]
NUM_TOKENS = 24
HIDDEN, INTERMEDIATE, VOCAB = 256, 288, 128
MODES = ("int8", "int4")

needs_native = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")


def llama(tie: bool = False) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=tie,
        dtype="float32",
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    llama(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_a_value_is_at_most_half_a_step_or_its_clipped_range(bits: Any) -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    codes = quantize(weight.numpy(), bits)
    error = (to_torch(codes.dequantize()) - weight).abs().view(7, 3, 32)
    if bits == 8:
        assert (error <= to_torch(codes.scales)[..., None] * 0.501).all()
    else:
        span = weight.view(7, 3, 32).amax(-1) - weight.view(7, 3, 32).amin(-1)
        assert (error.square().sum(-1) <= 32 * (span / 30).square()).all()
        assert float(error.mean()) < float(span.mean()) / 40


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_equal_values_and_of_exact_multiples_are_exact(bits: Any) -> None:
    equal = np.full((3, 32), 1.5, dtype=np.float32)
    assert np.array_equal(quantize(equal, 4).dequantize(), equal)
    assert not quantize(np.zeros((3, 32), dtype=np.float32), bits).dequantize().any()
    once = quantize(from_torch(torch.randn(5, 64, dtype=torch.bfloat16)), bits).dequantize()
    np.testing.assert_allclose(quantize(once, bits).dequantize(), once, rtol=1e-5, atol=1e-5)


def test_weights_decoded_from_4_bits_are_exact_in_4_bits_and_not_in_8() -> None:
    """This is why int8 has a larger error than int4 on a checkpoint decoded from 4-bit weights, and on no other."""
    generator = torch.Generator().manual_seed(6)
    random = torch.randn(32, 256, generator=generator).numpy()
    on_grid = quantize(random, 4).dequantize()
    errors = {
        (name, bits): float(np.linalg.norm(quantize(matrix, bits).dequantize() - matrix) / np.linalg.norm(matrix))
        for name, matrix in (("random", random), ("on the grid", on_grid))
        for bits in (4, 8)
    }
    assert errors["on the grid", 4] < 1e-4 < 0.003 < errors["on the grid", 8] < 0.01
    assert errors["random", 8] < 0.01 < 0.05 < errors["random", 4]


def test_large_matrices_are_quantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64).numpy()
    whole = quantize(weight, 4)
    monkeypatch.setattr("pagemill_kernels.pieces.PIECE_ELEMENTS", 200)
    assert np.array_equal(quantize(weight, 4).dequantize(), whole.dequantize())


def rounded_weights(path: Path, mode: Any) -> QuantizedWeights:
    return QuantizedWeights(open_weights(path), mode, load_model_spec(path).decoder)


def rounded_reference(folder: Path, mode: Any) -> Any:
    """Return transformers with the values that the quantized weights represent."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    weights = rounded_weights(folder, mode)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in weights.shapes:
                weights.read_into(name, tensor.numpy())
    return model


@pytest.mark.parametrize("mode", MODES)
def test_answers_equal_those_of_the_rounded_weights(
    folder: Path, mode: str, backend: str, runner_loader: Loader, make_driver: Callable[[Any], Any]
) -> None:
    reference = rounded_reference(folder, mode)
    prompts = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = reference.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[:, 20:].tolist()  # fmt: skip
    runner = runner_loader(folder, backend=backend, quantization=mode)
    results = make_driver(runner).greedy(prompts.tolist(), NUM_TOKENS)
    assert [result.token_ids for result in results] == expected


@needs_native
def test_quantized_weights_use_the_documented_memory_and_embedding_and_head_eight_bits(
    folder: Path, runner_loader: Loader
) -> None:
    runners = {mode: runner_loader(folder, quantization=mode) for mode in ("none", *MODES)}
    for mode in MODES:
        runner, planned = runners[mode], rounded_weights(folder, mode)
        assert runner.info.weight_bytes == pytest.approx(planned.num_bytes("float32", keep_stored=True), rel=1e-3)
        assert runner.info.weight_bytes < 0.35 * runners["none"].info.weight_bytes
        embedding = VOCAB * HIDDEN
        assert runner.model.head.product.num_bytes == runner.model.embedding.rows.num_bytes == embedding * 9 // 8
    assert runners["int4"].info.weight_bytes < runners["int8"].info.weight_bytes


def test_the_quantization_is_part_of_the_weights_digest(folder: Path, runner_loader: Loader) -> None:
    digests = {runner_loader(folder, quantization=mode).info.weights_digest for mode in ("none", *MODES)}
    assert len(digests) == 3


def test_at_most_one_float_matrix_is_in_memory(
    folder: Path, runner_loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill_execution.weights.safetensors_folder import SafetensorsFolder

    read_into, alive = SafetensorsFolder.read_into, dict[int, weakref.ref[Array]]()
    most: list[int] = []

    def watched(self: SafetensorsFolder, name: str, out: Array) -> None:
        if out.ndim == 2:
            owner = out if out.base is None else out.base
            alive[id(owner)] = weakref.ref(owner)
            held = [reference for reference in alive.values() if reference() is not None]
            most.append(len(held))
        read_into(self, name, out)

    monkeypatch.setattr(SafetensorsFolder, "read_into", watched)
    runner_loader(folder, quantization="int4")
    assert len(most) >= 15
    assert max(most) == 1


@needs_native
def test_a_float_gguf_file_is_quantized(tmp_path: Path, runner_loader: Loader) -> None:
    write_gguf(tmp_path / "f16.gguf", llama(), {})
    runner = runner_loader(tmp_path / "f16.gguf", quantization="int4")
    assert runner.info.weight_bytes < 0.3 * runner_loader(tmp_path / "f16.gguf").info.weight_bytes


@pytest.mark.parametrize(("stored", "mode"), [("Q8_0", "int8"), ("Q5_1", "int8"), ("Q4_1", "int8"), ("Q4_0", "int4")])
def test_stored_weights_of_few_bits_are_kept_and_the_log_says_so(
    tmp_path: Path, runner_loader: Loader, caplog: pytest.LogCaptureFixture, stored: str, mode: str
) -> None:
    write_gguf(tmp_path / "codes.gguf", llama(), {"": stored})
    left = runner_loader(tmp_path / "codes.gguf", quantization=mode)
    assert left.info.weights_digest == open_weights(tmp_path / "codes.gguf").digest()
    assert f"quantized already ({stored}) and stays as it is" in caplog.text


@pytest.mark.parametrize("stored", ["Q8_0", "Q5_0"])
def test_stored_weights_of_more_bits_are_rounded(
    tmp_path: Path, runner_loader: Loader, make_driver: Callable[[Any], Any], backend: str, stored: str
) -> None:
    """The embedding and the head keep their eight bits, and weights stored in four bits are kept."""
    path = tmp_path / "codes.gguf"
    write_gguf(path, llama(), {"attn_v": "Q4_1", "": stored})
    source, rounded = open_weights(path), rounded_weights(path, "int4")
    reference = llama()
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            rounded.read_into(name, tensor.numpy())
            exact = torch.empty_like(tensor)
            source.read_into(name, exact.numpy())
            stays = tensor.dim() == 1 or "v_proj" in name or "embed" in name or "lm_head" in name
            assert torch.equal(tensor, exact) == stays, name
    runner, whole = runner_loader(path, backend=backend, quantization="int4"), runner_loader(path, backend=backend)
    assert runner.info.weights_digest != whole.info.weights_digest
    if backend == "cpu_native":
        assert runner.info.weight_bytes < 0.75 * whole.info.weight_bytes
        assert runner.info.weight_bytes == pytest.approx(rounded.num_bytes("float32", keep_stored=True), rel=1e-2)
    prompts = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(5))
    results = make_driver(runner).greedy(prompts.tolist(), 6)
    for prompt, result in zip(prompts.tolist(), results, strict=True):
        with torch.no_grad():
            rows = reference(torch.tensor([prompt + result.token_ids])).logits[0, 19:-1].log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(result.token_ids)[:, None]).squeeze(1)
        assert result.logprobs == pytest.approx(chosen.tolist(), abs=5e-3)


@needs_native
def test_a_file_of_many_types_stays_quantized_and_gives_the_answers_of_its_values(
    tmp_path: Path, runner_loader: Loader, make_driver: Callable[[Any], Any]
) -> None:
    """As in Q4_K_M files, the three parts of one fused projection have three types."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "ffn_gate": "Q5_1", "ffn_up": "Q4_K"}
    path = tmp_path / "mixed.gguf"
    write_gguf(path, llama(), {**kinds, "attn_output": "Q5_1", "ffn_down": "Q5_0"})
    native, torch_only = runner_loader(path, backend="cpu_native"), runner_loader(path, backend="cpu")
    linears = [
        each for layer in native.model.layers for each in (layer.qkv, layer.output, layer.mlp.up, layer.mlp.down)
    ]
    assert len(linears) == 8
    assert all(linear._scales is not None for linear in linears)
    prompts = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(5)).tolist()
    ours, expected = (make_driver(runner).greedy(prompts, NUM_TOKENS) for runner in (native, torch_only))
    assert [result.token_ids for result in ours] == [result.token_ids for result in expected]
    for mine, reference in zip(ours, expected, strict=True):
        assert mine.logprobs == pytest.approx(reference.logprobs, abs=2e-3)

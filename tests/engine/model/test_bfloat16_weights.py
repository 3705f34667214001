"""`dtype: bfloat16`: weights of two bytes, with arithmetic in float32 or with bfloat16 matmuls.

The processor determines which of them runs; here it is forced. If oneDNN has no bfloat16, torch's matmul replaces it
(tests/kernels/test_onednn_linear.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.decoders.on_torch.layers import Linear
from pagemill_execution.sizing.compute import choose_compute
from pagemill_execution.weights.opening import open_weights
from pagemill_kernels.cpu import library, processor
from pagemill_kernels.linear import cpu, native, onednn, reference
from pagemill_models.spec.model_files import load_model_spec

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
VOCAB = 128
MODEL = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
NUM_TOKENS = 24
SOME_TOKENS = 6


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a float32 checkpoint whose values bfloat16 represents exactly."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), **MODEL, **VARIANTS[request.param])
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2, generator=generator)
            parameter.copy_(parameter.to(torch.bfloat16))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (1, 7, 16, 33, 70)]


def test_equal_values_stored_as_bfloat16_give_equal_answers(
    folder: Path, prompts: list[list[int]], runner_loader: Loader, make_driver: Drivers
) -> None:
    wide, narrow = (
        runner_loader(folder, backend="cpu_native", dtype=dtype, kv_cache_dtype="float32")
        for dtype in ("float32", "bfloat16")
    )
    expected = make_driver(wide).greedy(prompts, NUM_TOKENS)
    found = make_driver(narrow).greedy(prompts, NUM_TOKENS)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert narrow.info.weight_bytes < 0.55 * wide.info.weight_bytes


def test_a_bfloat16_checkpoint_stays_bfloat16_and_gives_the_same_bits(
    folder: Path, prompts: list[list[int]], tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    """Arithmetic is in float32, but matrices take two bytes for each of the stored values."""
    transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    wide, narrow = (runner_loader(path, backend="cpu_native") for path in (folder, tmp_path))
    expected = make_driver(wide).greedy(prompts, NUM_TOKENS)
    found = make_driver(narrow).greedy(prompts, NUM_TOKENS)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.logprobs for result in found] == [result.logprobs for result in expected]
    assert narrow.info.weight_bytes < 0.55 * wide.info.weight_bytes
    assert narrow.info.kv_dtype == "float32"
    planned = open_weights(tmp_path).num_bytes("float32", keep_stored=True)
    assert narrow.info.weight_bytes == pytest.approx(planned, rel=0.05)


def products_of(runner: Any) -> list[Any]:
    """Return the linear layers of the decoder."""
    layers = [layer for each in runner.model.model.layers for layer in each.layers()]
    return [layer for layer in layers if isinstance(layer, Linear)]


def test_bfloat16_matmuls_give_the_same_answers_within_rounding(
    folder: Path, prompts: list[list[int]], runner_loader: Loader, make_driver: Drivers
) -> None:
    exact = make_driver(runner_loader(folder)).greedy(prompts, SOME_TOKENS)
    runner = runner_loader(folder, backend="cpu_onednn", dtype="bfloat16")
    assert {type(linear.packed) for linear in products_of(runner)} == {onednn.OneDNNLinear}
    rounded = make_driver(runner).greedy(prompts, SOME_TOKENS)
    for a, b in zip(rounded, exact, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=0.15)


@pytest.mark.skipif(not library.has_bfloat16(), reason="no bfloat16 matmul on this processor")
def test_native_bfloat16_matmuls_give_the_same_answers_in_one_call(
    folder: Path, prompts: list[list[int]], runner_loader: Loader, make_driver: Drivers
) -> None:
    exact = make_driver(runner_loader(folder, dtype="float32")).greedy(prompts, SOME_TOKENS)
    runner = runner_loader(folder, backend="cpu_bfloat16", dtype="bfloat16")
    assert isinstance(runner.model, NativeDecoder)
    assert runner.info.weight_bytes == runner_loader(folder, backend="cpu_native", dtype="bfloat16").info.weight_bytes
    rounded = make_driver(runner).greedy(prompts, SOME_TOKENS)
    assert sum(a.token_ids == b.token_ids for a, b in zip(rounded, exact, strict=True)) >= len(prompts) // 2
    for a, b in zip(rounded, exact, strict=True):
        pairs = zip(a.token_ids, b.token_ids, strict=True)
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), SOME_TOKENS)
        assert a.logprobs[:same] == pytest.approx(b.logprobs[:same], abs=0.15)
        if same < SOME_TOKENS:
            assert a.logprobs[same] == pytest.approx(b.logprobs[same], abs=0.05), "answers may differ only at near ties"


def test_no_unpacked_copy_of_a_packed_weight_remains(folder: Path, runner_loader: Loader) -> None:
    """The table of a tied embedding is an exception: single rows cannot be read from oneDNN's layout."""
    backends = ("cpu_native", "cpu_onednn")
    ours, onednns = (runner_loader(folder, backend=backend, dtype="bfloat16").info for backend in backends)
    spec = load_model_spec(folder)
    table = VOCAB * spec.hidden_size * 2 if spec.tie_word_embeddings else 0
    # The blocks of the packed layout may be padded.
    assert ours.weight_bytes + table <= onednns.weight_bytes < 1.3 * (ours.weight_bytes + table)


def test_each_weight_is_packed_before_the_next_is_read(folder: Path, runner_loader: Loader) -> None:
    """The peak of loading is one unpacked matrix above the final size."""
    given: list[weakref.ref[torch.Tensor]] = []

    def watching(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        assert not any(ref() is not None for ref in given)
        given.append(weakref.ref(weight))
        return reference.pack_linear(weight.clone(), bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "pack_linear", watching)
        runner = runner_loader(folder, backend="cpu_onednn", dtype="bfloat16")
    assert len(given) == 4 * runner.model.spec.num_layers + 1


def test_quantized_weights_stay_quantized_with_native_matmuls(smollm2_path: Path, runner_loader: Loader) -> None:
    narrow = runner_loader(smollm2_path, backend="cpu_native", dtype="bfloat16", num_kv_blocks=16)
    assert narrow.info.weight_bytes < 115e6
    assert narrow.info.kv_dtype == "bfloat16"


ROUNDED = ", 4-bit weights times 16-bit activations" if library.has_dots() else ""

FEW = ", few rows of codes times 16-bit activations"


@pytest.mark.parametrize(
    ("settings", "dtype", "how"),
    [
        ({}, "bfloat16", "native kernels, oneDNN with AMX"),
        ({"kv_cache_dtype": "int8"}, "bfloat16", "native kernels, oneDNN with AMX"),
        ({"deterministic": True}, "float32", "native kernels"),
        ({"deterministic": True, "dtype": "bfloat16"}, "bfloat16", "native kernels"),
        ({"quantization": "int4"}, "float32", f"native kernels{ROUNDED}"),
        ({"dtype": "float32"}, "float32", "native kernels"),
    ],
    ids=str,
)
def test_on_a_processor_with_bfloat16_matmuls_the_settings_select_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], dtype: str, how: str
) -> None:
    monkeypatch.setattr(cpu, "can_pack", lambda dtype: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(processor, "has_amx", lambda: True)
    compute = choose_compute(EngineConfig(model="test", **settings), load_model_spec(folder))
    assert (compute.dtype, compute.how) == (dtype, how)
    assert compute.activation_dtype == "float32"
    assert (compute.ops.pack_linear is onednn.pack_linear) == ("oneDNN" in how)


@pytest.mark.parametrize(
    ("settings", "dtype", "how"),
    [
        ({}, "bfloat16", "native kernels, products with AVX512_BF16"),
        ({"dtype": "bfloat16"}, "bfloat16", "native kernels, products with AVX512_BF16"),
        ({"quantization": "int8"}, "bfloat16", f"native kernels, products with AVX512_BF16{FEW}"),
        ({"quantization": "int4"}, "bfloat16", f"native kernels, products with AVX512_BF16{FEW}"),
        ({"deterministic": True}, "float32", "native kernels"),
        ({"deterministic": True, "dtype": "bfloat16"}, "bfloat16", "native kernels"),
        ({"deterministic": True, "quantization": "int4"}, "float32", f"native kernels{ROUNDED}"),
        ({"dtype": "float32"}, "float32", "native kernels"),
        ({"dtype": "float32", "quantization": "int4"}, "float32", "native kernels"),
    ],
    ids=str,
)
def test_with_native_matmuls_the_settings_select_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], dtype: str, how: str
) -> None:
    monkeypatch.setattr(library, "has_bfloat16", lambda: True)
    monkeypatch.setattr(processor, "has_amx", lambda: False)
    compute = choose_compute(EngineConfig(model="test", **settings), load_model_spec(folder))
    assert (compute.dtype, compute.how) == (dtype, how)
    assert (compute.native_ops.pack_codes is native.pack_codes_for_bfloat16) == ("AVX512_BF16" in how)
    assert (compute.native_ops.pack_linear is native.pack_pairs) == ("AVX512_BF16" in how)
    assert compute.activation_dtype == "float32"
    assert compute.is_native


def test_the_selected_arithmetic_is_reported(folder: Path, runner_loader: Loader) -> None:
    assert runner_loader(folder, backend="cpu_onednn", dtype="bfloat16").info.compute == "bfloat16, cpu_onednn"

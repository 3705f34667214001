"""A model of each GGUF storage type gives the answers of transformers on the values read by the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf_model import stored_blocks, write_gguf

from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.dequantize import supported_types
from pagemill_engine.runner.factory import create_runner
from pagemill_kernels.cpu import library

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


def take_stored_values(model: Any, kind: str) -> None:
    """Replace the model's matrices by the values that the file stores."""
    storage = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                continue
            if kind.startswith(("Q", "IQ")):
                data = stored_blocks(kind, name, tensor.shape)
            else:
                data = gguf.quants.quantize(tensor.numpy(), storage)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, storage)).view(tensor.shape))


@pytest.mark.parametrize("kind", supported_types())
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


def test_every_documented_type_is_read() -> None:
    promised = {
        "Q4_0",
        "Q4_1",
        "Q2_K",
        "Q3_K",
        "IQ4_NL",
        "IQ4_XS",
        "Q4_K",
        "Q5_0",
        "Q5_1",
        "Q5_K",
        "Q6_K",
        "Q8_0",
        "F16",
        "BF16",
    }
    assert promised <= set(supported_types())


@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
@pytest.mark.parametrize(("kind", "said"), [("Q2_K", "8-bit codes of 12 bits"), ("IQ4_XS", "8-bit codes of 9 bits")])
def test_the_log_says_what_a_type_becomes_in_memory(tmp_path: Path, kind: str, said: str) -> None:
    write_gguf(tmp_path / "model.gguf", llama(), {"": kind})
    progress: list[str] = []
    settings = EngineConfig(model=str(tmp_path / "model.gguf"), num_kv_blocks=32, max_model_len=64)
    runner = create_runner(settings, lambda phase, detail: progress.append(detail))
    runner.close()
    assert f"{kind} as {said} a weight" in progress[0]

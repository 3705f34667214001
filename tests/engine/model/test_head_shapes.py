"""Layers whose heads differ in number and size, as local and global layers of some models: answers, memory, refusals.

The reference is transformers' Gemma 3 in which the layers that attend to everything have other heads than the others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import triton_device  # noqa: F401  (speeds up the interpreter)
from family_models import GEMMA3, VOCAB_SIZE
from greedy_families import greedy_reference
from packages import install_package
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RotaryEmbedding

from pagemill_execution.sizing.kv_sizes import kv_bytes_per_token
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.kv_store.kinds import KVType, token_bytes
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.sampling import SamplingParams

LOCAL = {
    **GEMMA3,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GLOBAL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}
PACKAGE = """
from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.family import Family
from pagemill_models.families import gemma3


def read_config(config):
    values = {**config._values, **config._values["of_global_layers"]}
    own = gemma3.read_config(config)
    other = gemma3.read_config(ConfigValues(config.path, values, config.architecture, config.held))
    return replace(own, layers=tuple((own, other)[index == 1].layers[index] for index in range(len(own.layers))))


FAMILY = Family(read_config)
"""
NAME = "TwoShapesForCausalLM"
PROMPTS = [[(11 * index + 5 * number) % VOCAB_SIZE for index in range(20 + 25 * number)] for number in range(2)]
NUM_TOKENS = 12
ASKS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Install the family as an installer does."""
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        install_package(site, patch, "two_shapes", PACKAGE, "pagemill.models", f"{NAME} = two_shapes:FAMILY")
        yield


@pytest.fixture(scope="module")
def reference() -> Any:
    config = transformers.Gemma3TextConfig(vocab_size=VOCAB_SIZE, initializer_range=0.3, **LOCAL)
    config._attn_implementation = "eager"
    other = deepcopy(config)
    other.update(GLOBAL)
    torch.manual_seed(1)
    model = transformers.Gemma3ForCausalLM(config).eval()
    model.model.layers[1].self_attn = Gemma3Attention(other, 1)
    turning = Gemma3RotaryEmbedding(other)
    model.model.rotary_emb.full_attention_inv_freq = turning.full_attention_inv_freq
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2 if parameter.dim() == 1 else 0.15)
    return model.eval()


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [NAME], "of_global_layers": GLOBAL}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[tuple[list[int], list[float]]]:
    """Return for each prompt the answer, and the log probabilities of the prompt's tokens and the answer's."""
    found = []
    for prompt in PROMPTS:
        answer, _ = greedy_reference(reference, prompt, NUM_TOKENS)
        sequence = torch.tensor([prompt + answer])
        with torch.no_grad():
            logprobs = reference(sequence, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(1, sequence[0, 1:, None])[:, 0].tolist()
        found.append((answer, chosen))
    return found


WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "native with torch's layers": {"by_torch": True},
    "torch": {"backend": "cpu"},
    "triton": {"device": "cuda"},
}


@pytest.mark.slow
@pytest.mark.sample("*native*", "*torch", "chunks-triton")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [{}, {"max_num_batched_tokens": 9}], ids=["whole", "chunks"])
def test_answers_are_those_of_transformers(
    folder: Path,
    expected: list[tuple[list[int], list[float]]],
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    way: str,
    steps: dict[str, int],
) -> None:
    runner = runner_loader(folder, max_num_seqs=4, **WAYS[way])
    assert [kind.layers for kind in runner.info.kinds] == [(1,), (0, 2)]
    results = make_driver(runner).generate(PROMPTS, [ASKS] * 2, max_num_seqs=4, **steps)
    for result, (token_ids, logprobs) in zip(results, expected, strict=True):
        assert result.token_ids == token_ids
        assert [*result.prompt_logprobs, *result.logprobs] == pytest.approx(logprobs, abs=2e-3)
    shapes = [layer.shape[1:] for layer in runner.kv_cache.layers]
    assert [tuple(shape) for shape in shapes] == [(4, 16, 32), (2, 16, 48), (4, 16, 32)]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_cache_takes_what_its_layers_take(folder: Path, runner_loader: Callable[..., Any], kind: KVType) -> None:
    runner = runner_loader(folder, kv_cache_dtype=kind)
    spec = load_model_spec(folder)
    local, whole = 4 * token_bytes(kind, 32), 2 * token_bytes(kind, 48)
    assert kv_bytes_per_token(spec, kind) == runner.info.kv_bytes_per_token == 2 * local + whole
    assert [each.block_bytes for each in runner.info.kinds] == [16 * whole, 16 * 2 * local]
    cache, kinds = runner.kv_cache, runner.info.kinds
    assert cache.num_bytes == sum(n * each.block_bytes for n, each in zip(runner.info.kind_blocks, kinds, strict=True))
    for each in kinds:  # both lie in one arena, which either may fill but for padding blocks
        held = sum(cache.layers[layer][:-1].nbytes for layer in each.layers)
        assert abs(held - cache.num_bytes) <= sum(kind.block_bytes for kind in kinds)


def test_a_kind_with_layers_of_both_shapes_gives_the_same_answers(
    folder: Path, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    """With a window of the whole context all layers are of one kind, and their blocks lie in one array."""
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", tmp_path)
    runners = [runner_loader(tmp_path, **way) for way in (WAYS["native"], WAYS["torch"])]
    assert [len(runner.info.kinds) for runner in runners] == [1, 1]
    ours, theirs = (make_driver(runner).generate(PROMPTS, [ASKS] * 2, waves=True) for runner in runners)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_heads_that_one_kind_of_kernel_lacks_are_computed_by_another(
    folder: Path, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    """The layers that need torch, or that no GPU kernel supports, decide for all, wherever they are."""
    config = json.loads((folder / "config.json").read_text())
    config["of_global_layers"] = {**GLOBAL, "head_dim": 584}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(vocab_size=VOCAB_SIZE, **LOCAL))
    other = deepcopy(reference.config)
    other.update(config["of_global_layers"])
    reference.model.layers[1].self_attn = Gemma3Attention(other, 1)
    reference.save_pretrained(tmp_path / "weights")
    shutil.copy(tmp_path / "weights" / "model.safetensors", tmp_path)
    assert "no native attention for heads of 584" in runner_loader(tmp_path).info.compute
    with pytest.raises(LoadError, match="heads of 584; multiples of 16"):
        runner_loader(tmp_path, device="cuda")

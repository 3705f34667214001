"""Families of other kinds than Llama's give the greedy answers of Hugging Face transformers on tiny random models.

The tests run prompts alone, in batches and in chunks, on every backend of the CPU. Planted faults must be detected.

The differences from Llama: GPT-2 has learned positions, Conv1D matrices and a tied head; BLOOM has ALiBi and a norm
after the embedding; GPT-NeoX has a partial rotary embedding and parallel blocks; GPT-J has an interleaved rotary
embedding; Phi-3 has fused matrices and a partial rotary embedding; Gemma 2 has soft caps, windows in every second layer
and norms after its blocks; OPT has positions with an offset; Falcon has one key and value head; Gemma 3 has two rotary
embeddings. Variants, and families with smaller differences, run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import GEMMA2, MODELS, ODD_SHAPES, VARIANTS, VOCAB_SIZE, write_model
from greedy_families import LENGTHS, NUM_TOKENS, Family, family_of, tokens_of

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_kernels.cpu import library

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
LARGEST_CHUNK = 16
IN_FULL = pytest.mark.full


def make_family(name: str, overrides: dict[str, Any], folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Family:
    model = write_model(name, overrides, folder)
    return family_of(model, folder, VOCAB_SIZE, lengths)


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(*MODELS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Return a function that makes a family by its name."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            lengths = LENGTHS if name in MODELS else LENGTHS[:-1]
            made[name] = make_family(*(MODELS | VARIANTS)[name], tmp_path_factory.mktemp("family"), lengths)
        return made[name]

    return get


@pytest.fixture(scope="module", params=["cpu_native", "cpu", pytest.param("reference", marks=IN_FULL)])
def any_backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


@pytest.fixture(scope="module")
def driver(family: Family, any_backend: str, runner_loader: Loader, make_driver: Drivers) -> Any:
    return make_driver(runner_loader(family.folder, backend=any_backend))


def test_the_two_best_tokens_differ_clearly(family: Family) -> None:
    assert family.median_gap > 0.5


def test_one_prompt_at_a_time_equals_transformers(family: Family, driver: Any) -> None:
    assert tokens_of(driver.greedy(family.prompts, NUM_TOKENS, waves=True)) == family.expected


def test_a_batch_equals_transformers(family: Family, driver: Any) -> None:
    results = driver.greedy(family.prompts * 3, NUM_TOKENS, enable_prefix_caching=False)
    assert tokens_of(results) == family.expected * 3


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=IN_FULL), 7, pytest.param(LARGEST_CHUNK, marks=IN_FULL)])
def test_any_chunk_size_equals_transformers(family: Family, driver: Any, chunk: int) -> None:
    prompts = family.prompts if chunk == LARGEST_CHUNK else family.prompts[:-1]
    results = driver.greedy(prompts, NUM_TOKENS, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    assert tokens_of(results) == family.expected[: len(prompts)]


def test_prefix_hits_and_preemption_change_nothing(family: Family, driver: Any) -> None:
    hit = driver.greedy(family.prompts * 2, NUM_TOKENS, waves=True)
    assert tokens_of(hit) == family.expected * 2
    assert sum(result.num_cached_tokens for result in hit[len(family.prompts) :]) >= 16 + 32 + 80 + 192
    preempted = driver.greedy(family.prompts, NUM_TOKENS, num_blocks=16, enable_prefix_caching=False)
    assert tokens_of(preempted) == family.expected
    assert sum(result.num_preemptions for result in preempted) > 0


def test_log_probabilities_equal_transformers(family: Family, driver: Any) -> None:
    prompt, expected = family.prompts[-1], family.expected[-1]
    with torch.no_grad():
        logits = family.reference(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
    reference = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None]).squeeze(1)
    ours = torch.tensor(driver.greedy([prompt], NUM_TOKENS)[0].logprobs)
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[IN_FULL] * (index % 6 > 0)) for index, name in enumerate(VARIANTS)]
)
def test_variants_equal_transformers(
    name: str, families: Callable[[str], Family], runner_loader: Loader, make_driver: Drivers
) -> None:
    variant = families(name)
    assert variant.median_gap > 0.5
    for backend in ("cpu_native", "cpu") if library.load() else ("cpu",):
        results = make_driver(runner_loader(variant.folder, backend=backend)).greedy(variant.prompts, NUM_TOKENS)
        assert tokens_of(results) == variant.expected


@pytest.mark.full
@pytest.mark.parametrize("name", ["bloom", "gemma2"])
def test_lowered_and_capped_scores_need_no_torch(name: str, tmp_path: Path, runner_loader: Loader) -> None:
    write_model(*MODELS[name], tmp_path)
    runner = runner_loader(tmp_path, kv_cache_dtype="int8", deterministic=True, dtype="float32")
    assert "torch" not in runner.info.compute
    assert isinstance(runner.model, NativeDecoder)


def test_a_low_cap_of_scores_gives_the_answers_of_transformers(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    """A tied head repeats the last token, whatever attention says."""
    shape = {**GEMMA2, "attn_logit_softcapping": 0.3, "tie_word_embeddings": False}
    capped = make_family("Gemma2ForCausalLM", shape, tmp_path)
    results = make_driver(runner_loader(tmp_path, dtype="float32")).greedy(capped.prompts, NUM_TOKENS)
    assert tokens_of(results) == capped.expected


@pytest.mark.slow
@pytest.mark.sample("opt with *", "falcon with one *", "gemma3", "starcoder2", "gpt-bigcode *", "qwen3")
@pytest.mark.parametrize("name", ODD_SHAPES)
def test_unusual_shapes_equal_transformers(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    """The test uses the backend that the engine selects for the shape."""
    odd = make_family(*ODD_SHAPES[name], tmp_path)
    driver = make_driver(runner_loader(tmp_path))
    for settings in ({"max_num_batched_tokens": 29}, {"num_blocks": 16, "enable_prefix_caching": False}):
        results = driver.greedy(odd.prompts, NUM_TOKENS, **settings)
        assert tokens_of(results) == odd.expected

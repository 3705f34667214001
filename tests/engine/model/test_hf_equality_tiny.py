"""Greedy answers of tiny random models of every supported architecture equal Hugging Face transformers exactly.

The tests run prompts alone and with everything that must not change tokens: batches, chunks, prefix hits and
preemption. Planted faults must be detected. The models are scaled so that the two best tokens differ clearly: a wrong
computation cannot hide in near ties. In bfloat16, tokens may differ, but only where the reference has a near tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy_families import greedy_references

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.decoders.rope import rope_tables
from pagemill_kernels.cpu import library
from pagemill_kernels.torch_arrays import to_torch

NUM_TOKENS = 40
VOCAB_SIZE = 512
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "dtype": "float32",
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN_SCALING = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3-wide-heads": ("Qwen3", {"head_dim": 32}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-mqa": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "initializer_range": 0.5}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "llama-rope-linear": ("Llama", {"rope_parameters": LINEAR_SCALING}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN_SCALING}),
}


@dataclass
class TinyModel:
    folder: Path
    reference: Any
    prompts: list[list[int]]
    expected: list[list[int]]
    """Greedy continuations by transformers."""
    median_gap: float
    """The median difference between the log probabilities of the two best tokens."""


def reference_model(kind: str, overrides: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **overrides})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
        if not config.tie_word_embeddings:
            model.lm_head.weight.mul_(4)
    return model


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(*ARCHITECTURES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(*VARIANTS[request.param], tmp_path_factory.mktemp(request.param))


def tiny_model(kind: str, overrides: dict[str, Any], folder: Path) -> TinyModel:
    model = reference_model(kind, overrides)
    model.save_pretrained(folder)
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    gaps: list[float] = []
    for length in (1, 16, 17, 40, 70):
        group = torch.randint(0, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(length)).tolist()
        tokens, group_gaps = greedy_references(model, group, NUM_TOKENS)
        prompts, expected, gaps = prompts + group, expected + tokens, gaps + group_gaps
    return TinyModel(folder, model, prompts, expected, float(torch.tensor(gaps).median()))


@pytest.fixture(scope="module")
def driver(tiny: TinyModel, backend: str, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]) -> Any:
    return make_driver(runner_loader(tiny.folder, backend=backend))


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_the_two_best_tokens_differ_clearly(tiny: TinyModel) -> None:
    assert tiny.median_gap > 0.5


def test_one_prompt_at_a_time_equals_transformers(tiny: TinyModel, driver: Any) -> None:
    assert tokens_of(driver.greedy(tiny.prompts, NUM_TOKENS, waves=True)) == tiny.expected


def test_a_batch_of_fifty_equals_transformers(tiny: TinyModel, driver: Any) -> None:
    prompts, expected = tiny.prompts * 5, tiny.expected * 5
    assert tokens_of(driver.greedy(prompts, NUM_TOKENS, enable_prefix_caching=False)) == expected


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.full), 7, pytest.param(16, marks=pytest.mark.full), 33]
)
def test_any_chunk_size_equals_transformers(tiny: TinyModel, driver: Any, chunk: int) -> None:
    results = driver.greedy(tiny.prompts, NUM_TOKENS, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    assert tokens_of(results) == tiny.expected


def test_a_prefix_hit_changes_nothing(tiny: TinyModel, driver: Any) -> None:
    results = driver.greedy(tiny.prompts * 2, NUM_TOKENS, waves=True)
    assert tokens_of(results) == tiny.expected * 2
    hits = [result.num_cached_tokens for result in results[len(tiny.prompts) :]]
    assert sum(hits) >= 2 * (16 + 32 + 64)


def test_a_prefix_hit_on_blocks_of_the_same_step_changes_nothing(tiny: TinyModel, driver: Any) -> None:
    prompts = [tiny.prompts[-1]] * 4
    assert tokens_of(driver.greedy(prompts, NUM_TOKENS)) == [tiny.expected[-1]] * 4


def test_preemption_changes_nothing(tiny: TinyModel, driver: Any) -> None:
    results = driver.greedy(tiny.prompts, NUM_TOKENS, num_blocks=14, enable_prefix_caching=False)
    assert tokens_of(results) == tiny.expected
    assert sum(result.num_preemptions for result in results) > 0


@pytest.mark.parametrize("oversubscription", [pytest.param(2.0, marks=pytest.mark.full), 4.0])
def test_a_cache_of_any_size_changes_nothing(tiny: TinyModel, driver: Any, oversubscription: float) -> None:
    """Running all fifty requests at once would need this many times the available blocks."""
    prompts = tiny.prompts * 5
    wanted_blocks = sum(-(-(len(prompt) + NUM_TOKENS) // driver.runner.info.block_size) for prompt in prompts)
    num_blocks = int(wanted_blocks / oversubscription)
    results = driver.greedy(prompts, NUM_TOKENS, num_blocks=num_blocks, enable_prefix_caching=False)
    assert tokens_of(results) == tiny.expected * 5


def test_logprobs_equal_transformers(tiny: TinyModel, driver: Any) -> None:
    prompt, expected = tiny.prompts[-1], tiny.expected[-1]
    with torch.no_grad():
        logits = tiny.reference(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
    reference = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None]).squeeze(1)
    ours = torch.tensor(driver.greedy([prompt], NUM_TOKENS)[0].logprobs)
    torch.testing.assert_close(ours, reference, atol=2e-4, rtol=1e-3)


def test_variants_of_the_architectures_equal_transformers(
    variant: TinyModel, backend: str, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    assert variant.median_gap > 0.5
    results = make_driver(runner_loader(variant.folder, backend=backend)).greedy(variant.prompts, NUM_TOKENS)
    assert tokens_of(results) == variant.expected


FAULTS = ["rope theta", "rope rotation", "slot off by one", "position off by one", "window off by eight"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_detected(
    tiny: TinyModel,
    fault: str,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = faulty_runner(fault, lambda: runner_loader(tiny.folder), monkeypatch)
    assert tokens_of(make_driver(runner).greedy(tiny.prompts, NUM_TOKENS)) != tiny.expected


def faulty_runner(fault: str, load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    runner = load()
    plant(fault, runner, monkeypatch)
    return runner


def plant(fault: str, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = runner.model
    if fault == "rope theta":
        (rope,) = model.spec.decoder.ropes()
        for table, wrong in zip(
            model._rotations.tables[0],
            rope_tables(rope.rotary_dim, 256, rope.theta * 1.1, rope.scaling),
            strict=True,
        ):
            table[:] = to_torch(wrong) if isinstance(table, torch.Tensor) else wrong
    elif fault == "rope rotation":
        model._rotations.tables = [(cos, -sin) for cos, sin in model._rotations.tables]
    elif fault == "position off by one":
        # A relative embedding does not change if all positions are shifted, so shift from the 10th on.
        for table in model._rotations.tables[0]:
            table[10:] = table[[*range(11, len(table)), 10]]
    elif fault == "slot off by one":
        gather = runner._rows.gather
        monkeypatch.setattr(runner._rows, "gather", lambda plan: shifted(gather(plan)))
    elif fault == "window off by eight":
        # The model has no window; adding one is an equivalent fault.
        if isinstance(model, NativeDecoder):
            plan = model._plan_attention
            model._plan_attention = lambda batch, window: plan(batch, (window or 40) - 8)
        else:
            plan_attention = model._ops.plan_attention
            narrow = lambda batch, window, *rest: plan_attention(batch, (window or 40) - 8, *rest)  # noqa: E731
            model._ops = model._ops._replace(plan_attention=narrow)


def shifted(inputs: Any) -> Any:
    return inputs._replace(slots=[slots + (inputs.positions % 16 == 7) for slots in inputs.slots])


NEAR_TIE_NATS = 0.1
NUM_BF16_TOKENS = 24
ROUNDED = [
    *(("cpu_onednn", architecture) for architecture in ARCHITECTURES),
    *(("cpu_native", architecture) for architecture in ("llama", "mistral-window")),
    *(("cpu", architecture) for architecture in ("llama", "qwen2", "qwen3-wide-heads")),
]
"""Models that cover each path of bfloat16: matmuls alone, no bfloat16, and everything in bfloat16."""
SAMPLE = (("cpu_onednn", "qwen3-wide-heads"), ("cpu_native", "mistral-window"), ("cpu", "llama"))


@dataclass
class RoundedModel:
    """A bfloat16 model on one backend, with the answers of its runner to each prompt alone."""

    load: Callable[[], Any]
    driver: Any
    reference: Any
    """transformers with the same rounded weights and float32 arithmetic."""
    prompts: list[list[int]]
    alone: list[list[int]]

    def greedy(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        results: list[Any] = self.driver.greedy(prompts, NUM_BF16_TOKENS, **settings)
        return results


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[pytest.mark.full] * (each not in SAMPLE), id="-".join(each)) for each in ROUNDED],
)
def rounded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
) -> RoundedModel:
    backend, architecture = request.param
    if backend != "cpu" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    folder = tmp_path_factory.mktemp("rounded")
    kind, overrides = ARCHITECTURES[architecture]
    # The logits are so large that bfloat16, with its 8 bits, resolves differences far smaller than a near tie.
    model = reference_model(kind, {**overrides, "initializer_range": 0.15})
    with torch.no_grad():
        model.lm_head.weight.div_(8)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    lengths = [length for length in (1, 16, 17, 40, 70) for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    load = lambda: runner_loader(folder, backend=backend, dtype="bfloat16")  # noqa: E731
    driver = make_driver(load())
    assert driver.runner.info.kv_dtype == "bfloat16"
    alone = [driver.greedy([prompt], NUM_BF16_TOKENS, enable_prefix_caching=False)[0].token_ids for prompt in prompts]
    return RoundedModel(load, driver, model.float(), prompts, alone)


@torch.no_grad()
def logprobs_after(model: Any, token_ids: list[int]) -> torch.Tensor:
    logprobs: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].log_softmax(-1)
    return logprobs


def widest_divergence_from_alone(rounded: RoundedModel, results: list[Any]) -> float:
    """Return the largest difference in nats, by the reference, between an answer and that of its prompt alone.

    The difference is that of the two tokens at which they first differ.
    """
    gaps = [0.0]
    num_prompts = len(rounded.prompts)
    for index, result in enumerate(results):
        prompt, alone = rounded.prompts[index % num_prompts], rounded.alone[index % num_prompts]
        assert len(result.token_ids) == NUM_BF16_TOKENS
        for position, (token, expected) in enumerate(zip(result.token_ids, alone, strict=True)):
            if token != expected:
                logprobs = logprobs_after(rounded.reference, prompt + alone[:position])
                gaps.append(abs(float(logprobs[token] - logprobs[expected])))
                break
    return max(gaps)


@pytest.mark.slow_for("cpu_onednn-*")
@torch.no_grad()
def test_bfloat16_alone_differs_from_transformers_only_at_near_ties(rounded: RoundedModel) -> None:
    for prompt, alone in zip(rounded.prompts, rounded.alone, strict=True):
        logits = rounded.reference(torch.tensor([prompt + alone[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)
        lost = logprobs.max(-1).values - logprobs.gather(1, torch.tensor(alone)[:, None]).squeeze(1)
        assert float(lost.max()) < NEAR_TIE_NATS


BF16_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "batch of 50": (5, {"enable_prefix_caching": False}),
    "chunks of 1": (1, {"max_num_batched_tokens": 1, "enable_prefix_caching": False}),
    "chunks of 7": (1, {"max_num_batched_tokens": 7, "enable_prefix_caching": False}),
    "chunks of 33": (1, {"max_num_batched_tokens": 33, "enable_prefix_caching": False}),
    "prefix hits": (2, {"waves": True}),
    "preemption": (1, {"num_blocks": 12, "enable_prefix_caching": False}),
}


IN_FULL = ("batch of 50", "chunks of 7", "chunks of 33")


@pytest.mark.slow_for("cpu_onednn-*")
@pytest.mark.sample("cpu_native-*", "cpu_onednn-*chunks of 1")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in IN_FULL)) for case in BF16_CASES]
)
def test_bfloat16_in_a_batch_differs_from_alone_only_at_near_ties(rounded: RoundedModel, case: str) -> None:
    copies, settings = BF16_CASES[case]
    results = rounded.greedy(rounded.prompts * copies, **settings)
    assert widest_divergence_from_alone(rounded, results) < NEAR_TIE_NATS
    assert sum(result.num_cached_tokens for result in results[10:]) >= (112 * 2 if case == "prefix hits" else 0)
    assert (sum(result.num_preemptions for result in results) > 0) == (case == "preemption")


# A rope base that is wrong by a tenth changes little within 100 tokens; the float32 test detects it.
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "rope theta"])
def test_the_divergence_of_a_planted_fault_exceeds_a_near_tie(
    rounded: RoundedModel, fault: str, make_driver: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(faulty_runner(fault, rounded.load, monkeypatch))
    results = driver.greedy(rounded.prompts, NUM_BF16_TOKENS)
    assert widest_divergence_from_alone(rounded, results) > 2 * NEAR_TIE_NATS

"""`deterministic`: a request gets the same bits in any batch, in any chunks, and with and without prefix hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import write_tiny_llama

from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import library
from pagemill_protocol.request.sampling import SamplingParams

needs_native = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

Loader = Callable[..., Any]
NUM_TOKENS = 6
VOCAB = 256
STORAGE: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int4 weights, int8 cache": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "int4 weights times rounded activations": {"quantization": "int4", "dtype": "auto"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        head_dim=12,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return fifty prompts of 1 to 50 tokens, of which no two have the same first token."""
    generator = torch.Generator().manual_seed(7)
    return [[i, *torch.randint(0, VOCAB, (i,), generator=generator).tolist()] for i in range(50)]


class Recorder:
    """Runs prompts and counts the bit patterns of all logits from which tokens were chosen."""

    def __init__(self, runner: Any, driver: Any) -> None:
        self._runner, self.driver = runner, driver

    def run(self, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], Counter[bytes]]:
        rows: Counter[bytes] = Counter()
        compute_logits = self._runner.model.logits

        def recorded(hidden: Array, adapters: Any) -> Array:
            logits: Array = compute_logits(hidden, adapters)
            rows.update(row.tobytes() for row in logits)
            return logits

        self._runner.model.logits = recorded
        try:
            results = self.driver.greedy(prompts, NUM_TOKENS, **settings)
        finally:
            self._runner.model.logits = compute_logits
        return [result.token_ids for result in results], rows


@pytest.fixture(scope="module", params=STORAGE)
def recorder(
    request: pytest.FixtureRequest, folder: Path, runner_loader: Loader, make_driver: Callable[[Any], Any]
) -> Recorder:
    runner = runner_loader(folder, deterministic=True, **STORAGE[request.param])
    return Recorder(runner, make_driver(runner))


@pytest.fixture(scope="module")
def alone(recorder: Recorder, prompts: list[list[int]]) -> tuple[list[list[int]], Counter[bytes]]:
    return recorder.run(prompts, waves=True, enable_prefix_caching=False)


@needs_native
@pytest.mark.parametrize("batch", [2, 7, 50])
def test_logits_have_the_same_bits_in_any_batch(
    recorder: Recorder, prompts: list[list[int]], alone: tuple[list[list[int]], Counter[bytes]], batch: int
) -> None:
    tokens: list[list[int]] = []
    rows: Counter[bytes] = Counter()
    for start in range(0, len(prompts), batch):
        some_tokens, some_rows = recorder.run(prompts[start : start + batch], enable_prefix_caching=False)
        tokens += some_tokens
        rows += some_rows
    assert tokens == alone[0]
    assert rows == alone[1]


@needs_native
def test_sampled_tokens_are_equal_alone_and_in_a_batch_of_fifty(recorder: Recorder, prompts: list[list[int]]) -> None:
    """The requests have seeds, filters, penalties and several choices, whose rows share steps and blocks."""
    params = [
        SamplingParams(
            temperature=0.9,
            top_p=0.95,
            repetition_penalty=1.0 + 0.3 * (index % 2),
            n=1 + index % 3,
            seed=index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    found = [
        [[choice.token_ids for choice in choices] for choices in recorder.driver.choices(prompts, params, waves=waves)]
        for waves in (True, False)
    ]
    assert found[0] == found[1]
    assert len({tuple(tokens) for choices in found[0] for tokens in choices}) > 90


@needs_native
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_logits_have_the_same_bits_in_any_chunks(recorder: Recorder, prompts: list[list[int]], chunk: int) -> None:
    some = prompts[5::11]
    found = recorder.run(some, max_num_batched_tokens=chunk, max_num_seqs=chunk, enable_prefix_caching=False)
    assert found == recorder.run(some, waves=True, enable_prefix_caching=False)


@needs_native
def test_logits_have_the_same_bits_after_prefix_hits_and_preemption(
    recorder: Recorder, prompts: list[list[int]]
) -> None:
    some = prompts[20::5]
    alone_tokens, alone_rows = recorder.run(some, waves=True, enable_prefix_caching=False)
    tokens, rows = recorder.run(some * 2, waves=True)
    assert tokens == alone_tokens * 2
    assert rows == alone_rows + alone_rows
    assert recorder.run(some, num_blocks=8, enable_prefix_caching=False) == (alone_tokens, alone_rows)


@needs_native
def test_without_the_setting_bits_depend_on_the_batch(
    folder: Path, prompts: list[list[int]], runner_loader: Loader, make_driver: Callable[[Any], Any]
) -> None:
    runner = runner_loader(folder)
    recorder = Recorder(runner, make_driver(runner))
    in_one = recorder.run(prompts[20:28], enable_prefix_caching=False)[1]
    in_chunks = recorder.run(prompts[20:28], max_num_batched_tokens=1, max_num_seqs=1, enable_prefix_caching=False)[1]
    assert in_one != in_chunks


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"deterministic": True}, "deterministic"), ({"kv_cache_dtype": "int8"}, "kv_cache_dtype")],
)
@pytest.mark.parametrize("cause", [{"dtype": "float16"}, {"backend": "cpu"}], ids=str)
def test_features_of_the_native_kernels_only_are_refused_on_other_backends(
    folder: Path, runner_loader: Loader, settings: dict[str, Any], field: str, cause: dict[str, str]
) -> None:
    with pytest.raises(LoadError, match=f"`{field}` .* needs the native kernels.*[Ss]et ") as error:
        runner_loader(folder, **settings, **cause)
    assert error.value.reason == "SettingsUnsupported"

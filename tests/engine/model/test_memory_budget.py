"""A model's memory is planned before it is loaded; a plan that does not fit is refused with the setting to change."""

from __future__ import annotations

import mmap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import write_tiny_llama
from torch.profiler import ProfilerActivity, profile

from pagemill_engine.config import EngineConfig
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.sampler import sample
from pagemill_execution.sizing import memory
from pagemill_execution.sizing.budget import DEFAULT_KV_BYTES, SAMPLER_FLOATS, Sizes, activation_bytes, plan_memory
from pagemill_execution.sizing.memory import MemoryState, measure_memory
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_protocol.request.sampling import SamplingParams

MIB, GIB = 1024**2, 1024**3
SIZES = Sizes(weight_bytes=110 * MIB, kv_bytes_per_token=46_080, item_bytes=4, gathers=False)


def state(available_bytes: int, limit_bytes: int = 4 * GIB) -> MemoryState:
    return MemoryState(limit_bytes, available_bytes, process_bytes=min(200 * MIB, limit_bytes - available_bytes))


@pytest.fixture(scope="module")
def spec(smollm2_path: Path) -> ModelSpec:
    return load_model_spec(smollm2_path)


@given(
    available_bytes=st.integers(0, 16 * GIB),
    used_bytes=st.integers(0, 4 * GIB),
    kv_bytes=st.none() | st.integers(1, 8 * GIB),
    max_num_seqs=st.integers(1, 4096),
    max_num_batched_tokens=st.integers(1, 100_000),
    gathers=st.booleans(),
)
def test_the_parts_of_a_plan_add_up_to_the_limit_or_it_is_refused(
    spec: ModelSpec, available_bytes: int, used_bytes: int, kv_bytes: int | None, gathers: bool, **step: int
) -> None:
    config = EngineConfig(model="m", kv_cache_memory_bytes=kv_bytes, **step)  # type: ignore[arg-type]
    limit_bytes = available_bytes + used_bytes
    try:
        plan = plan_memory(config, spec, SIZES._replace(gathers=gathers), state(available_bytes, limit_bytes))
    except LoadError:
        return
    budget = plan.budget
    parts = [budget.weight_bytes, budget.kv_bytes, budget.activation_bytes, budget.process_bytes, budget.other_bytes]
    assert sum(parts) + budget.free_bytes == budget.limit_bytes == limit_bytes
    assert min(*parts, budget.free_bytes) >= 0
    assert 0 < budget.kv_bytes <= (kv_bytes or DEFAULT_KV_BYTES)


def refusal(spec: ModelSpec, available_bytes: int, **engine: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        plan_memory(EngineConfig(model="m", **engine), spec, SIZES, state(available_bytes))
    return caught.value


def test_an_error_for_weights_that_do_not_fit_names_need_limit_and_remedy(spec: ModelSpec) -> None:
    error = refusal(spec, 50 * MIB)
    assert error.reason == "ModelTooLarge"
    assert "0.11 GiB" in error.message
    assert "0.05 GiB of memory are free, of 4.00 GiB allowed" in error.message
    assert "Raise resources.memory" in error.message


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ({"kv_cache_memory_bytes": 2 * GIB}, "kvCacheMemory asks for 2.00 GiB"),
        ({"num_kv_blocks": 3000}, "num_kv_blocks 3000 asks for 2.06 GiB"),
    ],
)
def test_an_error_for_a_cache_that_does_not_fit_names_the_setting(
    spec: ModelSpec, engine: dict[str, int], asked: str
) -> None:
    error = refusal(spec, GIB, **engine)
    assert error.reason == "KVCacheTooLarge"
    assert asked in error.message
    assert "Lower kvCacheMemory" in error.message


def test_an_error_for_a_step_that_does_not_fit_names_its_settings(spec: ModelSpec) -> None:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 512 * MIB, "max_num_batched_tokens": 1024}
    error = refusal(spec, GIB, max_num_seqs=256, **settings)
    assert error.reason == "StepTooLarge"
    assert "maxNumBatchedTokens 1024 and maxNumSeqs 256" in error.message
    assert "Lower maxNumSeqs, maxNumBatchedTokens or kvCacheMemory" in error.message
    plan_memory(EngineConfig(model="m", max_num_seqs=32, **settings), spec, SIZES, state(GIB))


def test_the_containers_limit_and_the_memory_of_this_process_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{4096 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{1000 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file {600 * MIB}\nactive_file {100 * MIB}\n")
    usual = type("Memory", (), {"available": 64 * GIB, "total": 128 * GIB})
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: usual)
    before = measure_memory(tmp_path)
    assert before.limit_bytes == 4096 * MIB
    assert before.available_bytes == 3796 * MIB
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as written:
        written.write(b"1" * len(written))
        grown = measure_memory(tmp_path).process_bytes - before.process_bytes
    assert 0.8 * 64 * MIB < grown < 2.5 * 64 * MIB


# -- the planned memory of the largest step, compared with its use ----------------------------------------------------


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak memory of arrays and torch's tensors during `run`."""
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, torch.inference_mode():
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            run()
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(np.cumsum(sizes), default=0)) + peak - before


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.95, "min_p": 1e-6, "logprobs": 5, "presence_penalty": 1.0},
    ],
)
def test_sampling_uses_no_more_than_its_share_of_the_plan(sampling: dict[str, Any]) -> None:
    num_rows, vocab_size = 8, 5000
    rows = SamplingRows(num_rows, vocab_size)
    for row in range(num_rows):
        rows.admit(row, AdmittedSequence(str(row), [1, 2], 2, 0, [], SamplingParams(**sampling), 0, row))
    flat = np.zeros(
        (num_rows, vocab_size), dtype=np.float32
    )  # no limit is among the best tokens: the whole vocabulary is sorted
    taken = peak_bytes(lambda: sample(flat, rows, np.arange(num_rows), np.zeros(num_rows, dtype=np.int64)))
    assert flat.nbytes + taken <= num_rows * vocab_size * 4 * SAMPLER_FLOATS


def test_the_largest_step_uses_the_planned_memory(
    tmp_path: Path, runner_loader: Callable[..., Any], backend: str
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 128, "num_attention_heads": 4}
    folder = write_tiny_llama(tmp_path, **shape, num_key_value_heads=2, max_position_embeddings=2048)
    settings = {"max_num_batched_tokens": 1024, "max_num_seqs": 1, "num_kv_blocks": 80, "max_model_len": 1200}
    runner = runner_loader(folder, backend=backend, **settings)
    budget = runner.info.memory
    assert budget is not None
    tokens = [token % 128 for token in range(1024)]
    row = AdmittedSequence(
        "a", tokens, 1024, 0, [HeldBlocks(0, list(range(64)))], SamplingParams(temperature=0.0), 0, 0
    )
    taken = peak_bytes(lambda: runner.launch(StepPlan(1, {"a": 1024}, admitted=[row], samples={"a"})))
    assert taken <= budget.activation_bytes
    assert taken >= 0.25 * budget.activation_bytes, "the plan must have the right size, not merely be large"


def test_memory_of_gathering_attention_is_planned(spec: ModelSpec) -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=4096, max_num_seqs=4)
    in_place, gathered = (
        activation_bytes(config, spec, SIZES._replace(gathers=gathers), 100_000) for gathers in (False, True)
    )
    assert gathered - in_place > 4096 * spec.max_position_embeddings * 4

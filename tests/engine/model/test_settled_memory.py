"""A GPU's KV cache gets the memory that measured steps leave; what does not fit names the setting to lower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device.graphs import shapes_to_capture
from pagemill_execution.sizing.budget import GPU_SHARE, MeasuredMemory, Sizes, plan_measured, plan_memory
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.starting import compiling, load_device
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.starting.memory_profiling import CudaMeter, profile_memory
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec

MIB, GIB = 1 << 20, 1 << 30
SIZES = Sizes(weight_bytes=16 * GIB, kv_bytes_per_token=131_072, item_bytes=2, gathers=False)
BEFORE = MemoryState(limit_bytes=80 * GIB, available_bytes=78 * GIB, process_bytes=0, is_gpu=True)
CONFIG = EngineConfig(model="test", max_num_seqs=256, max_num_batched_tokens=8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return load_model_spec(folder)


@given(
    held=st.integers(0, 4 * GIB), step=st.integers(0, 70 * GIB), recording=st.integers(0, GIB),
    kv_bytes=st.none() | st.integers(1, 90 * GIB),
)  # fmt: skip
def test_the_parts_and_the_free_memory_add_up_to_the_device_or_the_plan_is_refused(
    spec: ModelSpec, held: int, step: int, recording: int, kv_bytes: int | None
) -> None:
    config = EngineConfig(model="m", kv_cache_memory_bytes=kv_bytes)
    measured = MeasuredMemory(BEFORE.available_bytes - SIZES.weight_bytes - held, step, recording)
    try:
        plan = plan_measured(config, spec, SIZES, BEFORE, measured)
    except LoadError:
        assert held + step + recording + (kv_bytes or 0) > 40 * GIB or (kv_bytes or GIB) < 3 * MIB
        return
    budget = plan.budget
    parts = [budget.weight_bytes, budget.kv_bytes, budget.activation_bytes, budget.process_bytes, budget.other_bytes]
    assert sum(parts) + budget.free_bytes == BEFORE.limit_bytes
    assert min(*parts, budget.free_bytes) >= 0
    assert budget.activation_bytes >= held + step + recording
    assert budget.measured
    if kv_bytes is None:
        assert budget.free_bytes >= int((1 - GPU_SHARE) * BEFORE.available_bytes), "a share must stay free"


def test_memory_of_steps_is_not_given_to_the_cache(spec: ModelSpec) -> None:
    free = BEFORE.available_bytes - SIZES.weight_bytes
    small, large = (
        plan_measured(CONFIG, spec, SIZES, BEFORE, MeasuredMemory(free, step, 0)) for step in (GIB, 3 * GIB)
    )
    lost = (small.num_blocks - large.num_blocks) * CONFIG.block_size * SIZES.kv_bytes_per_token
    assert lost == pytest.approx(2 * GIB, abs=4 * MIB)


@pytest.mark.parametrize(
    ("settings", "reason", "words"),
    [
        ({}, "StepTooLarge", "maxNumBatchedTokens 8192 and maxNumSeqs 256, .* Lower maxNumSeqs, maxNumBatchedTokens"),
        ({"kv_cache_memory_bytes": 70 * GIB}, "KVCacheTooLarge", "kvCacheMemory asks for 70.00 GiB"),
        ({"num_kv_blocks": 40_000}, "KVCacheTooLarge", "num_kv_blocks 40000 asks for"),
    ],
)
def test_an_error_for_what_does_not_fit_names_its_setting(
    spec: ModelSpec, settings: dict[str, int], reason: str, words: str
) -> None:
    config = EngineConfig(model="test", max_num_seqs=256, max_num_batched_tokens=8192, **settings)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=words) as caught:
        plan_measured(config, spec, SIZES, BEFORE, MeasuredMemory(60 * GIB, 58 * GIB, 0))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("weight_bytes", "kv_bytes", "reason"),
    [(18 * GIB, None, "ModelTooLarge"), (8 * GIB, 20 * GIB, "KVCacheTooLarge"), (31 * GIB // 2, None, "StepTooLarge")],
)
def test_the_remedy_for_a_gpu_is_a_larger_gpu_not_a_larger_pod(
    spec: ModelSpec, weight_bytes: int, kv_bytes: int | None, reason: str
) -> None:
    state = MemoryState(18 * GIB, 17 * GIB, 0, is_gpu=True)
    config = EngineConfig(model="m", max_num_seqs=4096, max_num_batched_tokens=200_000, kv_cache_memory_bytes=kv_bytes)
    with pytest.raises(LoadError, match=r"[Tt]ake a GPU with more memory \(resources.gpuProduct\)") as caught:
        plan_memory(config, spec, SIZES._replace(weight_bytes=weight_bytes), state)
    assert caught.value.reason == reason
    assert "resources.memory" not in caught.value.message


def test_an_error_for_a_gpu_too_small_for_one_block_names_the_use_of_its_memory(spec: ModelSpec) -> None:
    state = MemoryState(18 * GIB, 17 * GIB, 0, is_gpu=True)
    with pytest.raises(LoadError, match="Lower maxNumSeqs"):
        plan_memory(CONFIG, spec, SIZES, state)


def test_the_step_size_of_a_gpu_engine_depends_on_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_device, "measure_device", lambda device: BEFORE)
    runner = create_runner(EngineConfig(model=str(folder), device="cuda", num_kv_blocks=64), lambda phase, detail: None)
    assert runner.info.step == (256, 8192)
    core = EngineCore(EngineConfig(model=str(folder)), runner)
    limits = core.scheduler.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 8192)
    runner.close()


class PlainRecorder:
    """Replaces CUDA graphs if there is no device."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class SimulatedMemory:
    """A simulated device memory instead of the host's; records what runs between two measurements."""

    def __init__(self, free_bytes: int, peaks_bytes: list[int]) -> None:
        self._free_bytes, self._peaks_bytes = free_bytes, peaks_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return self._peaks_bytes.pop(0)


@pytest.mark.slow
def test_the_cache_is_sized_by_measured_steps(
    folder: Path, spec: ModelSpec, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    config = EngineConfig(model="test", max_num_seqs=2, max_num_batched_tokens=5)
    runner = runner_loader(folder, device="cuda", num_kv_blocks=40, max_num_seqs=2)
    runner.capture_graphs(shapes_to_capture(2, 5), PlainRecorder)
    before = make_driver(runner).greedy([[3, 5, 7]], 3, max_num_seqs=2)
    shapes: list[tuple[int, int]] = []
    warm_up = runner.warm_up
    runner.warm_up = lambda *shape: (shapes.append(shape), warm_up(*shape))
    sizes = Sizes(0, runner.info.kv_bytes_per_token, 4, gathers=False)
    state = MemoryState(40 * MIB, 40 * MIB, 0, is_gpu=True)
    profile_memory(runner, config, spec, sizes, state, SimulatedMemory(20 * MIB, [8 * MIB, 4 * MIB]))
    assert {(2, 2), (1, 5), (2, 5)} <= set(shapes)
    assert shapes[-3:-1] == [(2, 2), (2, 5)], "the largest captured shape"
    assert shapes[-1] == (2, 5), "the largest step once more, with the cache"
    memory = runner.info.memory
    assert memory.measured
    assert memory.kv_bytes == runner.kv_cache.num_bytes <= 36 * MIB - 32 * MIB
    assert memory.kv_bytes > 3 * MIB
    assert runner.info.num_blocks == runner.kv_cache.counts[0] == len(runner.kv_cache.layers[0]) - 1
    assert runner._state.tables[0, runner._rows.layout.padding_row].eq(runner.info.num_blocks).all()
    assert not runner._graphs.shapes, "the graph reads a cache that was freed"
    [after], [unprofiled] = make_driver(runner).greedy([[3, 5, 7]], 3, max_num_seqs=2), before
    assert after.token_ids == unprofiled.token_ids
    # Graphs run padded shapes, whose products a processor may round in another order.
    assert after.logprobs == pytest.approx(unprofiled.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")], ids=["allocator", "driver"]
)
def test_an_error_for_a_device_without_memory_for_cuda_graphs_names_the_setting(
    folder: Path, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    runner = runner_loader(folder, device="cuda", num_kv_blocks=16, max_num_seqs=2)

    def full(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(runner, "capture_graphs", full)
    with pytest.raises(
        LoadError, match=r"up to 2 requests and 512 tokens .* Lower maxNumSeqs \(now 2\) or kvCacheMemory"
    ) as caught:
        compiling.capture_graphs(runner, EngineConfig(model="test", max_num_seqs=2), runner.model.spec)
    assert caught.value.reason == "GraphsTooLarge"


@pytest.mark.slow
@pytest.mark.sample("True")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_start_measures_then_allocates_then_captures(
    folder: Path, make_driver: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """Memory and CUDA graphs are simulated; everything else runs as on a device."""
    reported: list[str] = []
    recordings: list[Callable[[], None]] = []

    class Recorder:
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            recordings.append(run)
            return run

    monkeypatch.setattr(load_device, "compiles_ahead", lambda device: True)
    monkeypatch.setattr(load_device, "CudaMeter", lambda: SimulatedMemory(2 * GIB, [8 * MIB, 4 * MIB]))
    monkeypatch.setattr(compiling, "CudaGraphCapturer", Recorder)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="float32", max_num_seqs=3, max_num_batched_tokens=4, num_threads=1,
        kv_cache_memory_bytes=MIB, cuda_graphs=recorded,
    )  # fmt: skip
    runner: Any = create_runner(config, lambda phase, detail: reported.append(phase))
    assert reported == ["loading", "warming", "allocating", *["warming"] * recorded]
    assert len(recordings) == (4 if recorded else 0), "three decodes, and prompts"
    assert runner.info.memory.measured
    assert MIB - 2048 < runner.kv_cache.num_bytes <= MIB
    driver = make_driver(runner)
    alone = [driver.greedy([[3, 5, index]], 3)[0].token_ids for index in range(3)]
    together = driver.greedy([[3, 5, index] for index in range(3)], 3)
    assert [result.token_ids for result in together] == alone


@pytest.mark.gpu
def test_the_meter_of_a_device_measures_the_peak_of_a_step() -> None:
    meter = CudaMeter()
    free_bytes = meter.free_bytes()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert free_bytes - meter.free_bytes() >= 64 * MIB

    def run() -> None:
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda").fill_(1)

    peak_bytes = meter.peak_bytes(run)
    assert 256 * MIB <= peak_bytes <= 300 * MIB
    assert held.numel() == 64 * MIB


@pytest.mark.gpu
def test_a_gpu_engine_reports_a_measured_budget(folder: Path, runner_loader: Callable[..., Any]) -> None:
    runner = runner_loader(folder, device="cuda", num_kv_blocks=None, kv_cache_memory_bytes=64 * MIB)
    assert runner.info.memory.measured
    assert runner.info.memory.kv_bytes <= 64 * MIB
    assert runner.info.memory.free_bytes > 0

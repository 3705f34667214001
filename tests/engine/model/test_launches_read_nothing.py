"""A step is queued without reading from the device; checked without a device, on tensors that have only shapes.

Reading a value of such a tensor raises, as `torch.cuda.set_sync_debug_mode` does on a device (`test_device_runner`). So
no launch and no grid can depend on rows, lengths and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_llama import write_tiny_llama
from triton.runtime.interpreter import InterpretedFunction
from triton_device import HAS_GPU

from pagemill_execution.runners.device import device_kv_cache, device_runner
from pagemill_execution.runners.device.graphs import decode_shapes
from pagemill_execution.sizing.memory import measure_memory
from pagemill_execution.starting import load_device
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan, TableChanges
from pagemill_kernels.gpu import launch
from pagemill_kernels.registry import ops_for
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(HAS_GPU, reason="kernels of the interpreter are watched")

META = torch.device("meta")
Launch = tuple[str, tuple[int, ...]]


def upload(array: NDArray[Any], to: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.to(to, dtype or host.dtype)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record the launches with their grids; nothing runs."""
    found: list[Launch] = []

    def noted(kernel: InterpretedFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        assert not arguments, "kernels must be launched with keyword arguments only"
        found.append((kernel.fn.__name__, grid))

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


@pytest.fixture
def runner(
    tmp_path: Path, runner_loader: Callable[..., Any], launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Return a runner whose device has no values; queries that need no wait are answered."""
    ops_for.cache_clear()
    monkeypatch.setattr(launch, "device", lambda: META)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda: 8)
    for module in (launch, device_kv_cache, device_runner):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(launch, "download", lambda x: x)
    monkeypatch.setattr(device_runner, "_mark", lambda device: None)
    monkeypatch.setattr(load_device, "measure_device", lambda device: measure_memory())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    folder = write_tiny_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    yield runner_loader(folder, device="cuda", max_model_len=64, num_kv_blocks=32, max_num_seqs=4)
    ops_for.cache_clear()


ASKS: dict[str, dict[str, Any]] = {
    "a": {"temperature": 0.0},
    "b": {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5},
    "c": {"temperature": 0.7, "logit_bias": {3: 1.0}, "logprobs": 2},
}


def admitted(name: str, num_tokens: int, first_block: int) -> AdmittedSequence:
    held = [HeldBlocks(0, list(range(first_block, first_block + 3)))]
    return AdmittedSequence(name, list(range(num_tokens)), num_tokens, 0, held, SamplingParams(**ASKS[name]), 0, 0)


def plan(scheduled: dict[str, int], **fields: Any) -> StepPlan:
    return StepPlan(step=0, num_scheduled_tokens=scheduled, **{"samples": set(scheduled), **fields})


def queued(runner: Any, wanted: StepPlan) -> None:
    handle = runner.launch(wanted)
    assert handle.error is None, handle.error
    assert handle.read is not None, "only `wait` may read"


def prompts(num_tokens: int) -> StepPlan:
    names = list(ASKS)
    return plan(
        dict.fromkeys(names, num_tokens),
        admitted=[admitted(name, num_tokens, 4 * index) for index, name in enumerate(names)],
        released=names,
        tables=[TableChanges(copies=[(1, 30), (2, 31)])],
    )


def test_reading_from_such_a_device_raises() -> None:
    for look in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool):
        with pytest.raises((NotImplementedError, RuntimeError)):
            look(torch.ones(1, device=META))


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_steps_are_queued_without_reads_and_decodes_are_launched_alike_at_any_length(
    runner: Any, launches: list[Launch], recorded: bool
) -> None:
    if recorded:
        again = type("Again", (), {"capture": lambda self, run: run})
        runner.capture_graphs(decode_shapes(4), again)
    found: list[list[Launch]] = []
    for num_tokens in (3, 11, 40):
        queued(runner, prompts(num_tokens))
        launches.clear()
        queued(runner, plan(dict.fromkeys(ASKS, 1)))
        found.append([each for each in launches if each[0] != "write"])
    assert len(found[0]) > 8
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_step_of_prompts_and_decodes_reads_nothing(runner: Any, launches: list[Launch]) -> None:
    queued(runner, plan({"a": 5, "b": 3}, admitted=[admitted("a", 5, 0), admitted("b", 9, 4)], samples={"a"}))
    queued(runner, plan({"a": 1, "b": 6, "c": 7}, admitted=[admitted("c", 20, 8)], samples={"a", "b"}))
    queued(runner, plan({"a": 1, "b": 3, "c": 13}, proposals={"b": [5, 5]}))
    assert ("penalise", (3, 1)) in launches
    assert {"write", "build", "attend", "rope_and_store", "draw", "advance"} <= {name for name, _ in launches}

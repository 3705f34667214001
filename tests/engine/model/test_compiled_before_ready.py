"""Everything that a GPU compiles is compiled before the first request; checked by launches, without a device.

The interpreter compiles nothing, so launches are identified by what Triton would compile them for. On a device,
`test_device_runner` observes the compiler itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import write_tiny_llama
from triton.runtime.interpreter import InterpretedFunction
from triton_device import HAS_GPU

from pagemill_engine.config import EngineConfig
from pagemill_execution.runners.device.graphs import shapes_to_capture
from pagemill_execution.starting import compiling
from pagemill_execution.starting.compiling import compile_kernels
from pagemill_kernels.gpu import launch
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = [pytest.mark.skipif(HAS_GPU, reason="the device's own compiler is watched there"), pytest.mark.slow]

NUM_MULTIPROCESSORS = 8
"""Few enough that some steps of a tiny model use all of them and others do not."""
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
SMALL_LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
PROMPTS = ([8, 8, 8, 8], [1, 2, 3, 4], [7], [1], [20, 1, 1], [40, 3, 9, 2], [33, 33])
FEW_PROMPTS = ([1, 2, 3], [20, 1], [33])


def compiled_as(kernel: InterpretedFunction, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return what Triton specializes a kernel for: constants, types, and divisibility by 16."""
    unspecialized = kernel.kwargs["do_not_specialize"] or []
    parameters = inspect.signature(kernel.fn).parameters
    found = [
        (name, _kind(value, "constexpr" in str(parameters[name].annotation), name in unspecialized))
        for name, value in arguments.items()
        if name in parameters
    ]
    options = [(name, value) for name, value in arguments.items() if name not in parameters]
    return (kernel.fn.__name__, *sorted(found), *sorted(options))


def _kind(value: Any, is_constant: bool, unspecialized: bool) -> str:
    if is_constant:
        return f"= {value}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}, aligned {value.data_ptr() % 16 == 0}"
    if unspecialized or isinstance(value, float):
        return f"{type(value).__name__}, wide {abs(value) >= 2**31}"
    return f"int, one {value == 1}, even {value % 16 == 0}, wide {abs(value) >= 2**31}"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    found: set[tuple[Any, ...]] = set()
    run = InterpretedFunction.run

    def watched(kernel: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
        found.add(compiled_as(kernel, {name: named[name] for name in named if name not in ("grid", "warmup")}))
        return run(kernel, *arguments, **named)

    monkeypatch.setattr(InterpretedFunction, "run", watched)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda: NUM_MULTIPROCESSORS)
    return found


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 7, "min_p": 0.01},
    {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {3: 1.0}, "logprobs": 3},
]


def serve(driver: Any, batches: Sequence[list[int]], limits: dict[str, int]) -> None:
    """Serve batches of prompts of these lengths: alone and together, whole and in chunks, with all request fields."""
    for lengths in batches:
        prompts = [[(7 * i + length) % 64 for i in range(length)] for length in lengths]
        params = [
            SamplingParams(max_tokens=3, seed=index, ignore_eos=True, **FIELDS[(len(lengths) + index) % 4])
            for index in range(len(lengths))
        ]
        answers = driver.generate(prompts, params, **limits)
        assert all(answer.error is None for answer in answers)


CODES = {"quantization": "int4", "kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("settings", "batches", "limits"),
    [
        pytest.param({}, PROMPTS, LIMITS, marks=pytest.mark.full, id="floats"),
        pytest.param(CODES, PROMPTS, LIMITS, marks=pytest.mark.full, id="codes"),
        pytest.param(CODES, FEW_PROMPTS, SMALL_LIMITS, id="codes, small steps"),
    ],
)
def test_requests_launch_no_kernel_that_was_not_launched_before(
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    launched: set[tuple[Any, ...]],
    settings: dict[str, str],
    batches: Sequence[list[int]],
    limits: dict[str, int],
) -> None:
    folder = write_tiny_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    num_seqs = limits["max_num_seqs"]
    runner = runner_loader(folder, device="cuda", max_model_len=64, num_kv_blocks=32, max_num_seqs=num_seqs, **settings)
    assert not launched
    compile_kernels(runner, EngineConfig(model="test", **limits))
    before = set(launched)
    names = {kernel[0] for kernel in before}
    assert {"attend", "join_splits", "rope_and_store", "draw", "build", "write", "advance", "report"} <= names
    serve(make_driver(runner), batches, limits)
    assert launched - before == set()


def test_cuda_graphs_launch_no_kernel_that_was_not_launched_before(
    tmp_path: Path, runner_loader: Callable[..., Any], launched: set[tuple[Any, ...]]
) -> None:
    """One layer of each kind runs before a capture, with the captured shape: here two of three layers."""
    folder = write_tiny_llama(tmp_path, head_dim=16, num_hidden_layers=3)
    runner = runner_loader(folder, device="cuda", max_model_len=64, num_kv_blocks=32, max_num_seqs=4)
    unlike = runner.model.layers[2].residuals[1].branches[0].block
    unlike.output.packed._weight = unlike.output.packed._weight.double()
    with pytest.raises(RuntimeError, match="dtype"):
        runner.compile(1, 1)
    unlike.output.packed._weight = unlike.output.packed._weight.float()
    runner._forward._kinds.clear()
    found: list[int] = []

    class Watched:
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            before = set(launched)
            run()
            found.append(len(launched - before))
            return run

    runner.capture_graphs(shapes_to_capture(4, 40), Watched)
    assert len(runner._forward._kinds) == 1
    assert found == [0] * len(shapes_to_capture(4, 40))


@pytest.mark.full
def test_a_missing_shape_is_detected(
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    launched: set[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a prompt, attention of more tokens than a decode has is not launched."""
    folder = write_tiny_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    runner = runner_loader(folder, device="cuda", max_model_len=64, num_kv_blocks=32, max_num_seqs=4)
    monkeypatch.setattr(compiling, "step_shapes", lambda *limits: [(1, 1), (2, 2), (4, 4)])
    compile_kernels(runner, EngineConfig(model="test", **LIMITS))
    before = set(launched)
    serve(make_driver(runner), PROMPTS, LIMITS)
    assert {kernel[0] for kernel in launched - before} == {"attend"}

"""Every kernel that a launcher launches is compiled ahead of time and has a benchmark."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_resources
import pytest
from triton.runtime.interpreter import InterpretedFunction
from triton_device import HAS_GPU

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels" / "pagemill_kernels"
LAUNCH = re.compile(r"(?:triton|chunks)_body\.(\w+)\[")

pytestmark = pytest.mark.skipif(HAS_GPU, reason="kernels of the interpreter are watched")


def launchers() -> dict[str, set[str]]:
    """Return kernels by the folder whose launcher launches them."""
    return {path.parent.name: set(LAUNCH.findall(path.read_text())) for path in KERNELS.glob("*/triton_launch.py")}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found: set[str] = set()

    def noted(kernel: InterpretedFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert not arguments, "kernels must be launched with keyword arguments only"
        found.add(kernel.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


@pytest.fixture
def bench_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the benchmark's modules, whose names are not unique."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu"))
    yield
    for name in set(sys.modules) - before:
        if "bench/gpu" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_every_folder_has_kernel_launcher_and_reference() -> None:
    for name in launchers():
        assert (KERNELS / name / "reference.py").exists(), name
        assert (KERNELS / name / "triton_body.py").exists() or not launchers()[name], name
    assert set().union(*launchers().values()) >= {"attend", "normalize", "write", "multiply_scaled", "report"}


def test_every_kernel_can_be_compiled_from_tensors_without_values(launched: set[str]) -> None:
    """This shows that no launcher reads a tensor's values: its grid follows from shapes alone."""
    for case in kernel_resources.cases():
        with kernel_resources.recording():
            case.run()
    assert launched == set().union(*launchers().values())


def test_every_kernel_has_a_benchmark(launched: set[str], bench_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import attention_cases
    import kernel_cases
    from measuring import Device

    from pagemill_kernels.paged_attention import triton_launch

    monkeypatch.setattr(triton_launch, "choose_splits", lambda num_programs: 4)
    device = Device(tiny=True)
    for case in [*attention_cases.cases(device), *kernel_cases.cases(device)]:
        case.ours()
    assert launched == set().union(*launchers().values())

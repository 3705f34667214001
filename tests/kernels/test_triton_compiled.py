"""Hot kernels are compiled for an H100 on a machine without one, and their values fit into registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "kernel_resources.py"

EXPERTS = ["multiply_experts", "gate_and_mul", "multiply_experts", "add_weighted"]
IN_SAMPLE = {
    "attention decode in parts, heads of 128, int8 cache": ["attend", "join_splits"],
    "linear 4 bits, 1 rows": ["multiply_codes"],
    "experts 4 bits, 512 rows": EXPERTS,
    "linear int8 by int8, 64 rows": ["encode_rows", "multiply_scaled"],
    "inputs of a step": ["build"] * 2,
}
OTHERS = {
    "attention decode in parts, heads of 128": ["attend", "join_splits"] * 3,
    "attention decode, sinks": ["attend"],
    "experts 16 bits, 1 rows": EXPERTS,
    "linear fp8 by fp8, 512 rows": ["encode_rows", "multiply_scaled"],
    "draw after changes": ["draw"],
    "delta rule, 64 requests of 1": ["step"],
    "state space, 64 requests of 1": ["step", "finish_parts"],
}
"""A name stands for all cases whose names contain it."""


@pytest.mark.parametrize(
    "cases", [pytest.param(IN_SAMPLE, id="sample"), pytest.param(OTHERS, id="others", marks=pytest.mark.full)]
)
def test_hot_kernels_spill_no_registers(tmp_path: Path, cases: dict[str, list[str]]) -> None:
    # Kernels of the interpreter cannot be compiled, so this runs in a process that does not inherit the setting.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    argv = [sys.executable, str(SCRIPT), "--architectures", "90", "--only", *cases]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["spilling"] == []
    assert result["oversized"] == []
    assert sorted(row[1] for row in result["rows"]) == sorted(chain(*cases.values()))
    products = {row[0]: found[0] for row, found in zip(result["rows"], result["products"], strict=True)}
    if "linear int8 by int8, 64 rows" in cases:
        found = products["linear int8 by int8, 64 rows"]
        assert [name.rpartition(".s32.")[2] for name in found] == ["s8.s8"]
    else:
        found = products["linear fp8 by fp8, 512 rows"]
        assert [name.rpartition(".f32.")[2] for name in found] == ["e4m3.e4m3"]


@pytest.mark.full
def test_the_widest_heads_in_the_widest_type_fit_the_smallest_multiprocessors(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    argv = [sys.executable, str(SCRIPT), "--architectures", "89", "--only", "heads of 256, float32"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    kinds = ("decode", "prefill")
    assert [row[0] for row in result["rows"]] == [f"attention {kind}, heads of 256, float32" for kind in kinds]
    assert result["oversized"] == []


@pytest.mark.full
@pytest.mark.timeout(580)
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_no_hot_kernel_spills_on_any_architecture(architecture: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    argv = [sys.executable, str(SCRIPT), "--architectures", architecture]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=560, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["spilling"] == []
    cells = [row[-1] for row in result["rows"] if row[-1] != "refused"]
    assert len(cells) > 80
    assert result["oversized"] == []


@pytest.mark.full  # `make test` runs the same in the interpreter: bench/test_kernel_cases.py
def test_every_launched_kernel_is_among_the_compiled_ones() -> None:
    code = (
        "import json, kernel_resources as resources\n"
        "with resources.recording() as launched:\n"
        "    [case.run() for case in resources.cases()]\n"
        "print(json.dumps(sorted({kernel.kernel.__name__ for kernel in launched})))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    launchers = (ROOT / "kernels" / "pagemill_kernels").rglob("triton_launch.py")
    launched = {name for path in launchers for name in re.findall(r"_body\.(\w+)\[", path.read_text())}
    assert json.loads(done.stdout) == sorted(launched)


@pytest.mark.full
def test_features_that_an_older_device_lacks_are_reported_and_not_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    argv = [sys.executable, str(SCRIPT), "--architectures", "80", "89", "--only", "cache write, fp8 cache"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    ((*_, on_80, on_89),) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert on_80 == "refused"
    assert on_89.split(" / ")[1] == "0"


def test_the_kernels_import_only_torch_numpy_and_triton() -> None:
    """They run on a machine where no other package is installed."""
    code = (
        "import sys\n"
        "from pagemill_kernels import registry\n"
        "registry.ops_for('triton')\n"
        "packages = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(packages & {'msgspec', 'psutil', 'zmq', 'pydantic', 'transformers', 'pagemill_protocol'}))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

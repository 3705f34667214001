"""The repository's tests of the Triton path, on the device, if pytest and its plugins are installed.

They run in groups that compile for a few minutes each: on a device every shape of a test is a kernel of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import Device
from paths import HERE, ROOT
from results import Section

TESTS_S = 440
"""Less than a section's own limit, so that what was printed until then is reported."""
PLUGINS = ("pytest", "hypothesis", "pytest_asyncio", "pytest_timeout")
KERNELS = ROOT / "tests" / "kernels"
ENGINE = ROOT / "tests" / "engine" / "model"
GROUPS = {
    "tests-attention": [KERNELS / "test_triton_attention.py"],
    "tests-sampling": [KERNELS / "test_triton_sampling.py"],
    "tests-products": [KERNELS / "test_triton_linear.py", KERNELS / "test_triton_scaled_linear.py"],
    "tests-rows": [KERNELS / "test_triton_elementwise.py", KERNELS / "test_triton_request_rows.py"],
    "tests-engine": [ENGINE / name for name in ("test_device_runner.py", "test_settled_memory.py")],
    "tests-answers": [ENGINE / "test_triton_engine.py"],
}
OF_THE_ENGINE = ("tests-engine", "tests-answers")
ENGINE_LIBRARIES = ("msgspec", "psutil", "transformers", "pydantic", "zmq")


def run_group(group: str, device: Device, section: Section) -> None:
    table = section.table(f"{group} on the device", "result")
    needed = [*PLUGINS, *(ENGINE_LIBRARIES if group in OF_THE_ENGINE else ())]
    absent = [name for name in needed if not _is_installed(name)]
    if absent or device.tiny:
        why = f"no {', '.join(absent)}" if absent else "tiny sizes"
        table.add(f"not run: {why}; `smoke` and `kernels` check every kernel and the engine against their references")
        return
    problem, text = run_pytest(GROUPS[group], TESTS_S)
    table.add(summary_of(text))
    if problem:
        print(text[-20_000:])
        raise AssertionError(f"{problem}: {text[-1500:]}")


def summary_of(text: str) -> str:
    """Return pytest's own last line: libraries may print after it while the interpreter exits."""
    lines = text.strip().splitlines()
    return next((line for line in reversed(lines) if re.search(r"\d+ \w+.* in \d", line)), lines[-1] if lines else "")


def run_pytest(files: list[Path], limit_s: float) -> tuple[str, str]:
    """Return what went wrong, or "", and all that was printed."""
    # Warnings of other library versions are not failures here.
    options = ["-q", "-p", "no:cacheprovider", "-W", "default", "-m", "not slow", "--override-ini", "timeout=400"]
    argv = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile("w+") as output:
        try:
            ended = subprocess.run(argv, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=limit_s)
            problem = f"pytest returned {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s} s"
        output.seek(0)
        return problem, output.read()


def _is_installed(name: str) -> bool:
    """Whether the library itself is installed; the stand-ins do not count."""
    found = importlib.util.find_spec(name)
    return found is not None and HERE not in Path(found.origin or "").parents

"""The repository's tests of the Triton path, on the device: a row for each file, those that never passed first.

On a device every shape of a test is a kernel of its own, so most of the time is compiling, on many cores at once: files
run beside each other, but for those that measure the memory that is free.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import Device
from paths import HERE, ROOT
from rows import Section

PLUGINS = ("pytest", "hypothesis", "pytest_asyncio", "pytest_timeout")
ENGINE_LIBRARIES = ("msgspec", "psutil", "transformers", "pydantic", "zmq")
UNIT = "tests passed"
KERNEL_FILES = {
    "tests/kernels/test_distributed_ranks.py": "gpu or nccl",
    "tests/kernels/test_triton_parts.py": "",
    "tests/kernels/test_triton_states.py": "",
    "tests/kernels/test_triton_adapters.py": "",
    "tests/kernels/test_expert_kernels.py": "",
    "tests/kernels/test_triton_attention.py": "",
    "tests/kernels/test_triton_sampling.py": "",
    "tests/kernels/test_triton_linear.py": "",
    "tests/kernels/test_triton_scaled_linear.py": "",
    "tests/kernels/test_triton_elementwise.py": "",
    "tests/kernels/test_triton_request_rows.py": "",
}
ENGINE_FILES = {
    "tests/engine/model/test_experts.py": "triton or gpu",
    "tests/engine/model/test_prompt_logprobs.py": "gpu",
    "tests/engine/model/test_restricted_sampling.py": "cuda",
    "tests/engine/model/test_sleep_memory.py": "gpus",
    "tests/engine/model/test_device_runner.py": "",
    "tests/engine/model/test_device_hybrids.py": "",
    "tests/engine/model/test_drafts_on_device.py": "",
    "tests/engine/model/test_verified_tokens_on_device.py": "",
    "tests/engine/model/test_triton_engine.py": "",
    "tests/engine/model/test_settled_memory.py": "",
}
"""Each file and the words by which those of its tests that use a device are chosen; none: all of them."""
ALONE = ("tests/engine/model/test_sleep_memory.py", "tests/engine/model/test_settled_memory.py")
AT_ONCE = 4
"""Files that run at the same time."""
WORKERS = 4
"""Processes of each of them."""
COLLECTING_S = 280.0
"""Limit of a dry run, in which pytest only finds the tests of one file."""
SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error|errors|deselected)")


def run_tests(files: dict[str, str], limit_s: float, device: Device, section: Section) -> None:
    absent = [name for name in (*PLUGINS, *ENGINE_LIBRARIES) if not is_installed(name)]
    if absent:
        raise AssertionError(f"no {', '.join(absent)}: build the travelling folder (make bench-gpu-parts)")
    if device.is_dry_run:
        collect(section, next(iter(files)), COLLECTING_S)
        return
    ends_s = time.monotonic() + limit_s
    waiting = [name for name in files if section.has(name, UNIT) is None]
    waiting.sort(key=lambda name: name in section.ever)

    def run(name: str) -> str:
        return run_file(section, name, files[name], 1 if name in ALONE else WORKERS, ends_s - time.monotonic())

    with ThreadPoolExecutor(AT_ONCE) as threads:
        beside = [threads.submit(run, name) for name in waiting if name not in ALONE]
        problems = [problem for each in beside if (problem := each.result())]
    problems += [problem for name in waiting if name in ALONE and (problem := run(name))]
    if problems:
        raise AssertionError("; ".join(problems)[:1500])


def run_file(section: Section, name: str, words: str, workers: int, limit_s: float) -> str:
    """Run a file's tests and add its row; return what went wrong, or ""."""
    if limit_s <= 0:
        return f"{name}: no time was left"
    problem, text = run_pytest([ROOT / name], words, workers, limit_s)
    counts = counted(text)
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    failures = ", ".join(
        sorted({line.split(" ")[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))})
    )
    error = f"{problem}: {failures or text[-300:]}" if problem else ""
    section.add(name, UNIT, passed, limit=passed + failed, error=" ".join(error.split())[:600])
    if problem:
        print(text[-6000:], flush=True)
    return f"{name}: {problem}" if problem else ""


def collect(section: Section, name: str, limit_s: float) -> None:
    """Let pytest find the tests of one file, which are not run: nothing is computed."""
    _, text = run_pytest([ROOT / name], "", 0, limit_s, "--collect-only")
    found = re.search(r"(\d+) tests collected", text)
    if found is None:
        raise AssertionError(text[-500:])
    section.add(name, UNIT, float(found[1]), limit=float(found[1]))


def counted(text: str) -> dict[str, int]:
    """Return the numbers of pytest's own last line: libraries may print after it while the interpreter exits."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ \w+.* in \d", line)]
    return {word: int(number) for number, word in SUMMARY.findall(lines[-1])} if lines else {}


def run_pytest(files: list[Path], words: str, workers: int, limit_s: float, *more: str) -> tuple[str, str]:
    """Return what went wrong, or "", and all that was printed."""
    # Warnings of other library versions are not failures here.
    options = ["-q", "-p", "no:cacheprovider", "-W", "default", "-m", "not slow", "--override-ini", "timeout=200"]
    options += ["-k", words] if words else []
    options += ["-n", str(workers)] if workers > 1 and is_installed("xdist") else []
    argv = [sys.executable, "-m", "pytest", *options, *more, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile("w+") as output:
        try:
            ended = subprocess.run(argv, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=limit_s)
            problem = f"pytest returned {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
        output.seek(0)
        return problem, output.read()


def is_installed(name: str) -> bool:
    """Whether the library itself is installed; the stand-ins do not count."""
    found = importlib.util.find_spec(name)
    return found is not None and HERE not in Path(found.origin or "").parents

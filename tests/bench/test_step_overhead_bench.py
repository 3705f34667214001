"""`make bench` reports the cost of a step outside the model, for the numbers of requests of the goal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "step_overhead.py"


@pytest.fixture(scope="module")
def printed() -> str:
    argv = [sys.executable, str(SCRIPT), "--steps", "10"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_bench_of_step_overhead_is_listed() -> None:
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("BENCHES :="))
    assert SCRIPT.stem in line.split()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_the_cpu_time_of_a_step_is_reported_for_16_256_and_1024_requests(printed: str, loop: str) -> None:
    by_count = json.loads(printed.splitlines()[-1])["by_loop"][loop]
    assert list(by_count) == ["16", "256", "1024"]
    for count, figures in by_count.items():
        assert 0 < figures["input_building_cpu_ms"] < figures["step_cpu_ms"]
        assert figures["gpu_input_building_cpu_ms"] > 0
        assert f"{count} requests, {loop}" in printed

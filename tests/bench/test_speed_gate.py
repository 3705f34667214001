"""`make bench-gate` compares the working tree with a commit and fails below its limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gate import COMPILE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ARGV = [sys.executable, str(ROOT / "bench" / "gate.py"), "--base", "HEAD", "--pairs", "2", "--figures", "step"]


@pytest.mark.timeout(900)
@pytest.mark.sample("1000-1")
@pytest.mark.parametrize(("limit", "code"), [("0", 0), ("1000", 1)])
def test_a_ratio_below_the_limit_fails(limit: str, code: int) -> None:
    worktrees = _worktrees()
    done = subprocess.run([*ARGV, "--limit", limit], capture_output=True, text=True, timeout=800)
    assert done.returncode == code, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["ratios"]) == ["step"]
    assert result["ratios"]["step"] > 0
    assert ("slower than" in done.stderr) == bool(code)
    assert _worktrees() == worktrees, "the folder of the base commit must be removed"


def test_kernels_of_an_earlier_commit_need_no_build_backend() -> None:
    environment = {**os.environ, "PAGEMILL_KERNEL_MACHINE": "none"}
    argv = [sys.executable, "-c", COMPILE]
    done = subprocess.run(argv, cwd=ROOT / "kernels", env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler" in done.stdout


def _worktrees() -> list[str]:
    """Return the folders of the worktrees; other processes may add commits meanwhile."""
    argv = ["git", "worktree", "list", "--porcelain"]
    listed = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith("worktree ")]

"""Compiled kernels survive their process: the next one finds them and compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill_kernels.gpu.building import use_kernel_cache

COMPILE = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pagemill_kernels.gather import triton_body
from pagemill_kernels.gpu.building import use_kernel_cache

assert use_kernel_cache(Path(sys.argv[1])) is None
kernel = triton_body.gather_rows
types = {"table_ptr": "*fp32", "table_stride": "i64", "ids_ptr": "*i64", "out_ptr": "*fp32"}
sizes = {"SIZE": 64, "BLOCK": 64}
signature = types | dict.fromkeys(sizes, "constexpr")
triton.compile(ASTSource(kernel, signature, sizes), target=GPUTarget("cuda", 90, 32))
"""


def compile_into(folder: Path) -> dict[str, int]:
    """Compile into the folder; return its files with their modification times."""
    # Kernels of the interpreter cannot be compiled, so this runs in a process that does not inherit the setting.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    argv = [sys.executable, "-c", COMPILE, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_next_process_uses_the_compiled_kernels(tmp_path: Path) -> None:
    first = compile_into(tmp_path / "kernels")
    assert any(name.endswith("gather_rows.cubin") for name in first)
    assert compile_into(tmp_path / "kernels") == first


def test_a_read_only_folder_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    import triton

    before = triton.knobs.cache.dir
    file = tmp_path / "file"
    file.touch()
    assert isinstance(use_kernel_cache(file / "kernels"), OSError)
    assert triton.knobs.cache.dir == before

"""A process without an NVIDIA driver has torch and none of CUDA's mathematical libraries, which it could never use."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import write_tiny_llama

from pagemill_engine.runner.lean_torch import _UNNEEDED, _has_driver, _installed, _is_known

pytestmark = pytest.mark.skipif(
    _has_driver() or not _installed(), reason="CUDA's libraries could be used here, or torch came without them"
)
REPORT = """
import json, os
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({"libraries": sorted(maps), "flag": os.environ.get("TORCH_USE_RTLD_GLOBAL")} | facts))
"""


def run(program: str, *arguments: str, **variables: str) -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-c", program + REPORT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **variables},
    )
    report: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    loaded = {Path(path).name.partition(".so")[0] for path in report["libraries"] if "/nvidia/" in path}
    report["cuda"] = sorted(loaded.intersection(_UNNEEDED))
    return report


def test_torch_computes_without_them() -> None:
    report = run("""
from pagemill_engine.runner.lean_torch import import_torch
import_torch()
import torch
facts = {"sum": float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()), "cuda_there": torch.cuda.is_available()}
""")
    assert (report["sum"], report["cuda_there"], report["flag"]) == (512.0, False, None)
    assert report["cuda"] == []


def test_an_engine_answers_without_them(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    report = run(
        """
import sys
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.process import start_core
core = start_core(EngineConfig(model=sys.argv[1], num_kv_blocks=16), lambda phase, detail: None)
facts = {"steps": core.num_steps}
core.runner.close()
""",
        str(folder),
    )
    assert report["steps"] > 0, "its self test generated a token"
    assert report["cuda"] == []


def test_triton_compiles_and_runs_beside_such_a_torch(tmp_path: Path) -> None:
    """In its interpreter: it is the largest library that is loaded once torch's functions are visible to all."""
    pytest.importorskip("triton")
    folder = write_tiny_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    report = run(
        """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import self_test
from pagemill_engine.runner.factory import create_runner
config = EngineConfig(model=sys.argv[1], num_kv_blocks=16, device="cuda")
core = EngineCore(config, create_runner(config, lambda phase, detail: None))
self_test(core)
facts = {"compute": core.runner.info.compute, "steps": core.num_steps}
""",
        str(folder),
    )
    assert "Triton" in report["compute"]
    assert report["steps"] > 0
    assert report["cuda"] == []


def test_a_linker_that_looks_up_everything_gets_all_of_torch() -> None:
    report = run(
        """
from pagemill_engine.runner.lean_torch import import_torch
import_torch()
facts = {}
""",
        LD_BIND_NOW="1",
    )
    assert "libcublasLt" in report["cuda"]


def test_torch_that_is_there_already_stays_as_it_is() -> None:
    report = run("""
import torch
from pagemill_engine.runner.lean_torch import import_torch
import_torch()
facts = {"there": torch.cuda.is_available()}
""")
    assert report["cuda"] != [], "they had been loaded before"


def test_a_process_with_the_driver_gets_all_of_torch() -> None:
    report = run("""
from pagemill_engine.runner import lean_torch
lean_torch._DRIVER = "libc.so.6"
lean_torch.import_torch()
facts = {}
""")
    assert "libcublasLt" in report["cuda"]


def test_an_unknown_release_is_whole() -> None:
    report = run("""
from pagemill_engine.runner import lean_torch
lean_torch._KNOWN_RELEASES = ("0.0.",)
lean_torch.import_torch()
facts = {}
""")
    assert "libcublasLt" in report["cuda"]


def test_the_release_of_this_project_is_known() -> None:
    """When torch is upgraded: look into the new release as record 43 says, then add it."""
    assert _is_known()


def empty_library_here(name: str) -> bytes:
    from pagemill_engine.runner import empty_library

    return empty_library.empty_library(name, empty_library._machine())


def test_an_empty_library_is_found_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "any.so"
    file.write_bytes(empty_library_here("libnobody-has-this.so.7"))
    with pytest.raises(OSError):
        ctypes.CDLL("libnobody-has-this.so.7")
    ctypes.CDLL(str(file))
    ctypes.CDLL("libnobody-has-this.so.7")

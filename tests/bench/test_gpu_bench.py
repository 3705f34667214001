"""`make bench-gpu` runs from its first section to its files: on tiny shapes, without what it says it does not need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "triton", "numpy", "safetensors")
RUN = """
import importlib.abc, importlib.machinery, runpy, sys
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in {banned!r}:
            return None
        stand_ins = [folder for folder in sys.path if folder.endswith("stand_ins")]
        found = importlib.machinery.PathFinder.find_spec(name, stand_ins)
        if found is None:
            raise ModuleNotFoundError(f"{{name}} is not among what the command may need", name=name)
        return found
sys.meta_path.insert(0, Bare())
sys.argv = {argv!r}
runpy.run_path({folder!r}, run_name="__main__")
"""


def installed_beside(needed: tuple[str, ...]) -> set[str]:
    """Modules of all distributions here that none of `needed` asks for."""
    wanted, waiting = set(), list(needed)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in wanted:
            continue
        wanted.add(name)
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[\s;\[<>=!~(]", each)[0] for each in asked if "extra ==" not in each]
    modules = metadata.packages_distributions()
    return {
        module
        for module, names in modules.items()
        if not any(name.lower().replace("_", "-") in wanted for name in names) and not module.startswith("pagemill")
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("bench-gpu")
    banned = installed_beside(NEEDED)
    assert {"msgspec", "psutil", "transformers", "pytest"} <= banned
    assert not banned & {"torch", "triton", "numpy", "safetensors", "sympy"}
    sections = ["smoke", "engine-qwen3-0.6b", "peers-qwen3-0.6b"]
    argv = ["bench/gpu", "--sizes", "tiny", "--out", str(out), "--sections", *sections]
    code = RUN.format(banned=banned, argv=argv, folder=str(ROOT / "bench" / "gpu"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=out, env=environment, capture_output=True, text=True, timeout=280)
    return out, done


def test_it_needs_torch_triton_numpy_and_our_sources_alone(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert "written: " in done.stdout


def test_it_writes_what_it_found(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = ran
    found = json.loads((out / "results.json").read_text())
    assert found["machine"]["device"] == "Triton's interpreter", done.stderr
    smoke, engine, peers = found["sections"]
    assert [section["error"] for section in found["sections"]] == ["", "", ""]
    cases = [row[0] for row in smoke["tables"][1]["rows"] if row[1] == "pagemill"]
    assert any("sampler" in name for name in cases)
    assert any("mixed" in name for name in cases)
    offline = next(table for table in engine["tables"] if table["title"].startswith("offline"))
    columns = offline["columns"]
    assert all(row[columns.index("output tok/s")] > 0 for row in offline["rows"])
    assert [row[1] for row in peers["tables"][0]["rows"]] == ["", ""], "peers that are not there have no figures"
    text = (out / "results.md").read_text()
    assert all(f"## {section['name']}" in text for section in found["sections"])

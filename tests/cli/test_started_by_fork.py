"""A program that tests start as a fork behaves as if it was executed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from started_by_fork import executed
from waiting import WAIT_LIMIT_S, wait_until

PAGEMILL = [sys.executable, "-m", "pagemill"]


def run(arguments: list[str], folder: Path, environment: dict[str, str], *, fork: bool) -> tuple[int, str, str]:
    with nullcontext() if fork else executed():
        done = subprocess.run(
            [*PAGEMILL, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_LIMIT_S
        )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["up", "-f", "file.yaml"], ["no-such-command"], ["chat", "--url", "nowhere"]])
def test_its_exit_code_output_folder_and_variables_are_those_of_an_executed_one(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file.yaml").write_text("kind: LLMDeployment\n")
    environment = {**os.environ, "COLUMNS": "71"}
    assert run(arguments, tmp_path, environment, fork=True) == run(arguments, tmp_path, environment, fork=False)


@pytest.mark.parametrize("first", [3, 7, 203, 206])
def test_it_inherits_files_under_their_own_numbers(tmp_path: Path, first: int) -> None:
    """Also in a process that has hundreds of open files, where numbers that fork servers use are in use."""
    names = [f"Kind{number}" for number in range(6)]
    for name in names:
        (tmp_path / name).write_text(f"kind: {name}\n")
    files = [os.open(tmp_path / name, os.O_RDONLY) for name in names]
    numbers = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first) for file in files]
    for name, number in zip(names, numbers, strict=True):
        command = [*PAGEMILL, "up", "-f", f"/dev/fd/{number}"]
        done = subprocess.run(command, pass_fds=numbers, capture_output=True, text=True, timeout=WAIT_LIMIT_S)
        assert done.returncode != 0
        assert f'kind: "{name}"' in done.stderr
    for file in [*files, *numbers]:
        os.close(file)


def test_it_is_a_child_with_its_own_command_line_and_ends_by_signals(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"port": 0, "control_port": 0}')
    command = [sys.executable, "-m", "pagemill_gateway", "--settings", str(settings)]
    before = {(each.path, each.fd) for each in psutil.Process().open_files()}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert b"listening" in process.stderr.readline()
        child = psutil.Process(process.pid)
        assert child.ppid() == os.getpid()
        assert os.getsid(child.pid) == child.pid
        assert child.cmdline() == command
        assert psutil.Process(child.pid).num_fds() < 64
        process.kill()
        assert process.wait(WAIT_LIMIT_S) == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(child.pid))
    assert {(each.path, each.fd) for each in psutil.Process().open_files()} == before

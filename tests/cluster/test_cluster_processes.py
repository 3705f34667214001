"""Processes of the test cluster: a later command finds them, and reused process ids are not killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

Module = Callable[[str], ModuleType]
# The command that starts a component ends before it.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def processes(module: Module) -> ModuleType:
    return module("processes")


def test_a_process_outlives_its_starter_and_is_stopped_by_name(processes: ModuleType, tmp_path: Path) -> None:
    processes.start(tmp_path, "sleeper", SLEEP)
    process = processes.started(tmp_path)["sleeper"]
    assert processes.is_running(process)
    processes.stop(tmp_path, "sleeper")
    assert not processes.is_running(process)
    assert processes.started(tmp_path) == {}


def test_the_output_of_a_failed_process_can_be_read(processes: ModuleType, tmp_path: Path) -> None:
    processes.start(tmp_path, "broken", [sys.executable, "-c", "raise SystemExit('no such disk')"])
    with suppress(ChildProcessError):  # `subprocess` reaps a process that has ended before its object is deleted
        os.waitpid(processes.started(tmp_path)["broken"]["pid"], 0)
    assert "no such disk" in processes.log_tail(tmp_path, "broken")


def test_a_reused_process_id_is_not_killed(processes: ModuleType, tmp_path: Path) -> None:
    with subprocess.Popen(SLEEP) as innocent:
        record = {"etcd": {"pid": innocent.pid, "program": "/opt/other/etcd"}}
        (tmp_path / "pids.json").write_text(json.dumps(record))
        processes.stop(tmp_path, "etcd")
        assert innocent.poll() is None
        innocent.kill()
    assert processes.started(tmp_path) == {}


def test_stopping_a_process_that_never_ran_is_no_error(processes: ModuleType, tmp_path: Path) -> None:
    processes.stop(tmp_path, "kubelet")
    assert processes.log_tail(tmp_path, "kubelet") == ""


def test_stopping_one_component_leaves_the_others_running(processes: ModuleType, tmp_path: Path) -> None:
    for name in ("first", "second"):
        processes.start(tmp_path, name, SLEEP)
    processes.stop(tmp_path, "first")
    (remaining,) = processes.started(tmp_path).values()
    assert processes.is_running(remaining)
    processes.stop(tmp_path, "second")

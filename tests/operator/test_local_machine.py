"""The local backend's functions for this machine: ports, cores, GPUs and private folders."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill_operator.backends.base import BackendError
from pagemill_operator.backends.local.child import Child
from pagemill_operator.backends.local.machine import least_used, threads_per_engine, visible_gpus
from pagemill_operator.backends.local.ports import PortInUse, ensure_bindable, free_port
from pagemill_operator.backends.local.state_dir import OWNER_FILE, PREFIX, StateDir, remove_abandoned
from pagemill_operator.backends.local.supervisor import describe


def test_an_error_for_a_port_in_use_names_the_flag() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} .* --port"):
            ensure_bindable("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("192.0.2.1", 0), ("no.such.host.invalid", 0)])
def test_an_error_for_an_impossible_address_names_the_flag(host: str, port: int) -> None:
    with pytest.raises(BackendError, match=r"--(port|host)"):
        ensure_bindable(host, port)


def test_a_free_port_can_be_bound() -> None:
    ensure_bindable("127.0.0.1", free_port())


@pytest.mark.parametrize(("cores", "engines", "threads"), [(2, 2, 1), (8, 3, 2), (1, 4, 1), (4, 0, 4)])
def test_engines_share_the_cores(cores: int, engines: int, threads: int) -> None:
    assert threads_per_engine(cores, engines) == threads


def test_gpus_are_those_of_the_driver_unless_the_environment_restricts_them(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-a1"}, tmp_path) == ("3", "GPU-a1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_replicas_use_the_gpus_in_turn() -> None:
    assert least_used(("0", "1"), [], 1) == ("0",)
    assert least_used(("0", "1"), ["0"], 1) == ("1",)
    assert least_used(("0", "1"), ["0", "1", "1"], 1) == ("0",)
    assert least_used(("0", "1", "2"), ["0"], 2) == ("1", "2")
    assert least_used(("0", "1"), ["0"], 3) == ("1", "0"), "the engine says that these are too few"
    assert least_used((), ["0"], 1) == least_used(("0",), [], 0) == ()


def test_state_is_private_and_removed(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    path = state.write_json("engine.json", {"token": "secret"})
    assert state.path.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    state.remove()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    here, young = StateDir(tmp_path), tmp_path / f"{PREFIX}young"
    young.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from pagemill_operator.backends.local.state_dir import StateDir\n"
        "state = StateDir(Path(sys.argv[1])); print(state.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        elsewhere = Path(other.stdout.readline().strip())
        remove_abandoned(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([here.path, young, elsewhere])
        other.kill()
    assert (elsewhere / OWNER_FILE).exists()
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([here.path, young])
    here.remove()


async def test_a_child_that_outlives_its_backend_does_not_keep_the_folder(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    child = await Child.start(
        [sys.executable, "-c", "import time; time.sleep(60)"], os.environ, state.log_path("child")
    )
    state._lock.close()
    remove_abandoned(tmp_path)
    assert child.running
    assert not state.path.exists()
    await child.end(0)


def test_an_error_for_a_folder_that_cannot_be_created_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="XDG_RUNTIME_DIR"):
        StateDir(tmp_path / "missing")


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    state = StateDir(deep)
    assert state.temporary is None
    state.remove()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"phase": "loading", "detail": "weights 40 %"}', "loading weights 40 %"),
        (b'{"phase": "loading", "detail": "loading weights"}', "loading weights"),
        (b'{"phase": "starting"}', "starting"),
        (b"{}", "not ready"),
        (b"[1]", "not ready"),
        (b"<html>", "not ready"),
        (b"\xff", "not ready"),
    ],
)
def test_a_readyz_answer_is_translated_to_text(body: bytes, words: str) -> None:
    assert describe(body) == words


def test_a_folder_that_is_deleted_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / f"{PREFIX}gone"])
    remove_abandoned(tmp_path)

"""What a pod of a group does by itself: it takes its number from the environment, and outlives its ranks' requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pagemill_engine import drain
from pagemill_engine.config import EngineConfig, NodesConfig
from pagemill_engine.failure import StartupError
from pagemill_engine.server.settings import load_settings

NODES = {"count": 2, "of_group": True}


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"engine": {"model": "m", "tensor_parallel_size": 2, "nodes": NODES}}))
    return path


def test_a_pod_takes_its_number_and_the_leaders_address_from_the_environment(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "chat-group-0.chat-group.ns")
    nodes = load_settings(settings_file).engine.nodes
    assert nodes is not None
    assert (nodes.rank, nodes.address) == (1, "chat-group-0.chat-group.ns")


@pytest.mark.parametrize("index", [None, "2", "x"])
def test_a_pod_without_a_usable_number_says_what_gives_it(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, index: str | None
) -> None:
    monkeypatch.delenv("LWS_WORKER_INDEX", raising=False)
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "a")
    if index is not None:
        monkeypatch.setenv("LWS_WORKER_INDEX", index)
    with pytest.raises(StartupError, match=r"LWS_WORKER_INDEX.*Check its admission webhook") as caught:
        load_settings(settings_file)
    assert caught.value.termination.reason == "SettingsInvalid"


def test_before_a_pod_ends_that_only_computes_its_ranks_end(
    settings_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError  # no server listens in such a pod

    monkeypatch.setattr(drain, "drain", refuse)
    process = tmp_path / "proc" / "7" / "cmdline"
    process.parent.mkdir(parents=True)
    process.write_bytes(b"python\0-m\0" + drain.RANK_MODULE + b"\0")
    real = drain.wait_for_ranks
    monkeypatch.setattr(drain, "wait_for_ranks", lambda: real(tmp_path / "proc"))
    monkeypatch.setattr(drain, "RANKS_POLL_S", 0.01)
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(drain.main(["--settings", str(settings_file)])))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    process.unlink()
    waiting.join(30)
    assert codes == [0]


def test_the_ranks_module_is_the_one_that_nodes_start() -> None:
    from pagemill_engine.starting.nodes import RANK_PROCESS

    assert RANK_PROCESS.encode() == drain.RANK_MODULE


WAITING = """
import sys
from pathlib import Path
import msgspec
from pagemill_engine.config import EngineConfig
from pagemill_engine.starting import nodes
class Ended:
    def __init__(self, *_): pass
    def wait(self): print("ended", flush=True)
    def terminate(self): pass
nodes.NodeProcesses = Ended
nodes.run_node(msgspec.json.decode(sys.argv[1], type=EngineConfig), Path("."))
"""


def test_a_pod_of_a_group_waits_for_its_signal_when_its_ranks_have_ended() -> None:
    """A container that ends is started again, and would join the group that replaces its own."""
    nodes: dict[str, Any] = {"count": 2, "rank": 1, "address": "a", "token": "t", "of_group": True}
    config = json.dumps({"model": "m", "tensor_parallel_size": 2, "nodes": nodes})
    argv = [sys.executable, "-c", WAITING, config]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ended\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_an_address_is_needed_outside_of_groups() -> None:
    with pytest.raises(ValueError, match="master_addr is empty"):
        NodesConfig(count=2)
    assert EngineConfig(model="m", tensor_parallel_size=2, nodes=NodesConfig(count=2, of_group=True)).ranks_here == 1

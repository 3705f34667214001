"""What a pod of a group does by itself: it takes its number from the environment, and outlives its ranks' requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_engine import drain
from pagemill_engine.config import EngineConfig
from pagemill_engine.failure import StartupError
from pagemill_engine.server.settings import load_settings
from pagemill_execution.config import NodesConfig
from pagemill_execution.starting import rendezvous
from pagemill_execution.starting.nodes import RANK_PROCESS, NodeRankSettings
from pagemill_operator.backends.local.ports import free_port

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


@pytest.fixture
def nodes() -> NodesConfig:
    return NodesConfig(count=2, rank=1, address="127.0.0.1", port=free_port(), token="known", timeout_s=60)


@pytest.fixture
def rank(nodes: NodesConfig) -> Iterator[subprocess.Popen[bytes]]:
    """A rank that looks for the first pod, which does not listen yet."""
    config = EngineConfig(model="m", tensor_parallel_size=2, nodes=nodes)
    argv = [sys.executable, "-m", RANK_PROCESS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(NodeRankSettings(config, "m", 1, os.getpid(), 1)))
        process.stdin.close()
        yield process
        process.kill()


def test_a_pod_that_only_computes_ends_after_ranks_that_have_joined_and_waits_for_no_others(
    settings_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: NodesConfig,
    rank: subprocess.Popen[bytes],
) -> None:
    """A worker that was started again alone looks for a first pod that is ending: nothing would come to wait for."""

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError  # no server listens in such a pod

    pod = tmp_path / "proc"
    pod.mkdir()
    (pod / str(rank.pid)).symlink_to(f"/proc/{rank.pid}")
    real = drain.wait_for_ranks
    monkeypatch.setattr(drain, "drain", refuse)
    monkeypatch.setattr(drain, "wait_for_ranks", lambda: real(pod))
    monkeypatch.setattr(drain, "RANKS_POLL_S", 0.01)
    wait_until(lambda: drain._arguments(pod / str(rank.pid))[2:3] == [RANK_PROCESS.encode()])
    codes: list[int] = []

    def ended() -> threading.Thread:
        waiting = threading.Thread(target=lambda: codes.append(drain.main(["--settings", str(settings_file)])))
        waiting.start()
        return waiting

    ended().join(WAIT_LIMIT_S)
    assert codes == [0]
    assert rank.poll() is None
    listener = rendezvous.listen(nodes, b"known", lambda why: None)
    (joined,) = listener.collect([("join", 1)], time.monotonic() + 60, lambda left: None).values()
    waiting = ended()
    waiting.join(0.05)
    assert waiting.is_alive()
    joined.close()
    listener.close()
    waiting.join(WAIT_LIMIT_S)
    assert codes == [0, 0]


WAITING = """
import sys
from pathlib import Path
import msgspec
from pagemill_engine.config import EngineConfig
from pagemill_execution.starting import nodes
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
        assert process.wait(WAIT_LIMIT_S) == 0


def test_an_address_is_needed_outside_of_groups() -> None:
    with pytest.raises(ValueError, match="master_addr is empty"):
        NodesConfig(count=2)
    assert EngineConfig(model="m", tensor_parallel_size=2, nodes=NodesConfig(count=2, of_group=True)).ranks_here == 1

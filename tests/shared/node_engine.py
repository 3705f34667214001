"""Engines whose ranks are on several nodes: node 0 here, the others as processes of their own, over loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from ranked_engine import SETTINGS

from pagemill_engine.config import EngineConfig, NodesConfig
from pagemill_engine.executing.ranks.ranked import RankedRunner
from pagemill_engine.sizing.compute import choose_compute
from pagemill_engine.starting.nodes import load_nodes
from pagemill_engine.starting.preparing import ModelFiles
from pagemill_kernels.cpu import launch
from pagemill_models.spec.model_files import load_model_spec

TOKEN = "a token of all nodes"
Nodes = Callable[..., RankedRunner]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def node_config(folder: Path, size: int, num_stages: int = 1, count: int = 2, **more: Any) -> EngineConfig:
    nodes = NodesConfig(count=count, address="127.0.0.1", port=free_port(), token=TOKEN, timeout_s=60.0)
    nodes = msgspec.structs.replace(nodes, **{key: more.pop(key) for key in ("timeout_s",) if key in more})
    parallel = {"tensor_parallel_size": size // num_stages, "pipeline_parallel_size": num_stages, "num_threads": size}
    return EngineConfig(model=str(folder), nodes=nodes, **SETTINGS | parallel | more)


class NodeProcess:
    """A node that only computes, as its pod runs it."""

    def __init__(self, folder: Path, config: EngineConfig, rank: int, module: str | None = None, **nodes: Any) -> None:
        """Start it. `folder`: for its settings and what it says. `module`: of its ranks' processes, if not the usual."""
        assert config.nodes is not None
        own = msgspec.structs.replace(config, nodes=msgspec.structs.replace(config.nodes, rank=rank, **nodes))
        self.path = folder / f"node{rank}"
        self.path.with_suffix(".json").write_text(json.dumps({"engine": msgspec.to_builtins(own), "server": {}}))
        with self.path.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pagemill_engine.server", "--settings", str(self.path.with_suffix(".json"))],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ended(self, seconds: float = 60.0) -> tuple[int, str]:
        """Return the exit code and all that it has said."""
        code = self.process.wait(seconds)
        return code, self.path.with_suffix(".log").read_text()


@contextmanager
def node_loader(folder: Path) -> Iterator[Nodes]:
    """Yield a function that loads a model on nodes. `folder`: for what they say."""
    made: list[RankedRunner] = []
    nodes: list[NodeProcess] = []
    threads = launch.num_threads()

    def load(model: Path, size: int, num_stages: int = 1, stuck_seconds: float = 60.0, **more: Any) -> RankedRunner:
        count = more.get("count", 2)
        config = node_config(model, size, num_stages, **more)
        nodes.extend(NodeProcess(folder, config, rank) for rank in range(1, count))
        spec = load_model_spec(model)
        files = ModelFiles(config, model, spec, lambda phase, detail: None)
        made.append(load_nodes(files, choose_compute(config, spec), stuck_seconds))
        made[-1].nodes = nodes  # type: ignore[attr-defined]
        return made[-1]

    yield load
    for runner in made:
        runner.close()
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
        node.process.wait(30)
    launch.set_num_threads(threads)

"""Engines whose ranks are on several nodes, over loopback: node 0 here, the others as processes, or as threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from ranked_engine import SETTINGS
from waiting import START_LIMIT_S

from pagemill_engine.config import EngineConfig
from pagemill_execution.config import NodesConfig
from pagemill_execution.runners.ranks.ranked import RankedRunner
from pagemill_execution.sizing.compute import choose_compute
from pagemill_execution.starting import node_rank
from pagemill_execution.starting.nodes import NodeRankSettings, load_nodes
from pagemill_execution.starting.preparing import ModelFiles
from pagemill_kernels.cpu import launch
from pagemill_models.spec.model_files import load_model_spec
from pagemill_operator.backends.local.ports import free_port


def node_config(folder: Path, size: int, num_stages: int = 1, **more: Any) -> EngineConfig:
    nodes = NodesConfig(count=more.pop("count", 2), address="127.0.0.1", port=free_port(), token="known", timeout_s=180)
    parallel = {"tensor_parallel_size": size // num_stages, "pipeline_parallel_size": num_stages, "num_threads": size}
    return EngineConfig(model=str(folder), nodes=nodes, **SETTINGS | parallel | more)


def of_node(config: EngineConfig, rank: int, model: Path | None = None, **nodes: Any) -> EngineConfig:
    """Return the settings of another node. `nodes`: what differs there."""
    own = msgspec.structs.replace(config.nodes, rank=rank, **nodes)
    return msgspec.structs.replace(config, nodes=own, model=config.model if model is None else str(model))


def load_first(config: EngineConfig, stuck_seconds: float = 60.0) -> RankedRunner:
    folder = Path(config.model)
    spec = load_model_spec(folder)
    files = ModelFiles(config, folder, spec, lambda phase, detail: None)
    return load_nodes(files, choose_compute(config, spec), stuck_seconds)


class NodeProcess:
    """A node that only computes, as its pod runs it."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Start it. `folder`: for its settings and for what it says."""
        assert config.nodes is not None
        path = folder / f"node{config.nodes.rank}.json"
        path.write_text(json.dumps({"engine": msgspec.to_builtins(config), "server": {}}))
        self.said = path.with_suffix(".log")
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pagemill_engine.server", "--settings", str(path)],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def end(self) -> tuple[int, Any]:
        """Wait for its end. Returns the exit code and the termination message."""
        code = self.process.wait(START_LIMIT_S)
        lines = self.said.read_text().splitlines()
        return code, json.loads(lines[-1]) if lines else None


class NodeThread:
    """The only rank of a node, in a thread of this process."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.nodes is not None
        self.error: BaseException | None = None
        settings = NodeRankSettings(config, config.model, config.nodes.rank, os.getpid(), 1)
        self._thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
        self._thread.start()

    def join(self) -> BaseException | None:
        """Wait for its end. Returns what it has raised."""
        self._thread.join(START_LIMIT_S)
        assert not self._thread.is_alive()
        return self.error

    def _run(self, settings: NodeRankSettings) -> None:
        try:
            node_rank.run(settings)
        except BaseException as error:
            self.error = error


@contextmanager
def kept_threads() -> Iterator[None]:
    """Restore the number of this process's compute threads."""
    threads = launch.num_threads()
    yield
    launch.set_num_threads(threads)


Load = Callable[..., RankedRunner]

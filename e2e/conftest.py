"""One Kubernetes API server for the whole session, and a kubectl that talks to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = [sys.executable, str(ROOT / "e2e" / "cluster")]


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl against the test cluster; `ok` and `json` fail the test where kubectl fails."""

    binary: str
    kubeconfig: str

    def run(self, *arguments: str, stdin: object = None) -> subprocess.CompletedProcess[str]:
        text = stdin if isinstance(stdin, str | None) else json.dumps(stdin)
        argv = [self.binary, "--kubeconfig", self.kubeconfig, *arguments]
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)

    def ok(self, *arguments: str, stdin: object = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def json(self, *arguments: str, stdin: object = None) -> Any:
        return json.loads(self.ok(*arguments, "-o", "json", stdin=stdin))


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    state = tmp_path_factory.mktemp("cluster")
    done = subprocess.run([*CLUSTER, "up", "--state", str(state)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stderr} (`make e2e` builds what is missing)"
    exports = dict(word.split("=", 1) for word in done.stdout.split()[1:])
    try:
        yield Kubectl(f"{exports['PATH'].split(':')[0]}/kubectl", exports["KUBECONFIG"])
    finally:
        subprocess.run([*CLUSTER, "down", "--state", str(state)], check=True, timeout=60)

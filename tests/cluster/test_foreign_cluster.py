"""The end-to-end cases refuse a cluster in use and have access only to the given context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KUBECTL = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
*"config view"*) echo 'the kubeconfig of one context' ;;
*"get $EXISTS"*) echo "$EXISTS" ;;
esac
"""
PROGRAM = """
import json, sys
from pathlib import Path
import pytest
from support.clusters import foreign
try:
    with foreign("theirs", "/their/config", Path(sys.argv[1])) as cluster:
        print(json.dumps(cluster.kubectl.kubeconfig))
except pytest.exit.Exception as refusal:
    sys.exit(str(refusal))
"""


def start(folder: Path, exists: str) -> subprocess.CompletedProcess[str]:
    """Start a session on a context, with a kubectl that finds only the object `exists`."""
    for name, text in (("kubectl", KUBECTL), ("helm", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "EXISTS": exists, "CALLS": f"{folder}/calls", "PYTHONPATH": str(ROOT / "e2e")}
    argv = [sys.executable, "-c", PROGRAM, str(folder)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("found", ["crd/llmdeployments.pagemill.dev", "namespace/pagemill-system", "secrets"])
def test_a_cluster_with_an_installation_is_refused_by_the_name_of_the_found_object(tmp_path: Path, found: str) -> None:
    refused = start(tmp_path, exists=found)
    assert refused.returncode == 1
    assert f"context theirs: {found} exist" in refused.stderr
    assert "Use another cluster" in refused.stderr


def test_an_empty_cluster_is_used_with_a_kubeconfig_of_its_context_alone(tmp_path: Path) -> None:
    done = start(tmp_path, exists="nothing")
    assert done.returncode == 0, done.stderr
    own = Path(json.loads(done.stdout))
    assert own.read_text() == "the kubeconfig of one context\n"
    assert own.stat().st_mode & 0o077 == 0
    view, *looks = (tmp_path / "calls").read_text().splitlines()
    assert view == "--kubeconfig /their/config --context theirs config view --raw --minify --flatten"
    assert len(looks) == 3
    assert all(look.startswith(f"--kubeconfig {own} ") for look in looks)

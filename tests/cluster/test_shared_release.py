"""The shared release of end-to-end cases is removed even if its installation failed halfway."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELM = """#!/bin/sh
case "$*" in
*" upgrade "*) echo install >> "$CALLS"; [ "$(grep -c install "$CALLS")" != 1 ] ;;
*" uninstall "*) echo uninstall >> "$CALLS" ;;
esac
"""
PROGRAM = """
import sys
from support.clusters import Cluster
from support.kubectl import Kubectl
from support.release import Releases
releases = Releases(Cluster(Kubectl("true", "kubeconfig"), sys.argv[1]), "tag")
try:
    releases.shared()
except AssertionError:
    print("failed")
releases.shared()
releases.shared()
releases.close()
releases.close()
"""


def test_remains_of_a_failed_installation_are_removed_before_the_next_one(tmp_path: Path) -> None:
    helm, calls = tmp_path / "helm", tmp_path / "calls"
    helm.write_text(HELM)
    helm.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "e2e"), "CALLS": str(calls)}
    argv = [sys.executable, "-c", PROGRAM, str(helm)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "failed\n"
    assert calls.read_text().split() == ["install", "uninstall", "install", "uninstall"]

"""The commands of docs/how-to/serve-a-hugging-face-model.md work with its example and a hub in the cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import yaml
from support import hubs
from support.kubectl import Kubectl
from support.objects import Document, llmdeployment, merged
from support.release import Release

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "serve-a-hugging-face-model.md"
EXAMPLE = "examples/hugging-face.yaml"
TYPED_TIMEOUT_S = 300.0


def test_the_page_leads_from_a_token_to_an_answer(release: Release, space: Kubectl, tmp_path: Path) -> None:
    example = yaml.safe_load((ROOT / EXAMPLE).read_text())
    _write(tmp_path / EXAMPLE, yaml.safe_dump(_from_hub(example, hubs.start(space, release.image_tag))))
    _write(tmp_path / "bin" / "kubectl", f'#!/bin/sh\nexec {shlex.join(space.argv())} "$@"\n').chmod(0o755)
    steps = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(steps) == 2
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -euo pipefail", *steps])],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "HF_TOKEN": hubs.TOKEN},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TYPED_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in release.service(example["spec"]["model"]["name"]).ask("What is the capital of France?")


def _from_hub(example: Document, endpoint: str) -> Document:
    """Return the example with the only file of the test's hub as its model and with resources that fit the node."""
    small = llmdeployment("", engine={"env": [{"name": "HF_ENDPOINT", "value": endpoint}]})["spec"]
    small["model"] = {"source": f"hf://{hubs.REPOSITORY}/{hubs.FILE}", "cache": {"size": "1Gi"}}
    return {**example, "spec": merged(example["spec"], small)}


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path

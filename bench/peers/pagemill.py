"""Pagemill itself: the offline `LLM` as worker, the engine's server for the online rows.

Neither is measured if torch's fallback runs instead of the native kernels; the load report states which one runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from peers.catalogue import OURS, THREADS, Peer, Precision, Server, Worker
from peers.install import FOLDER
from peers.wire import Generate, Jobs, Tokens, serve

NATIVE = ", native kernels"
"""Text in the engine's load report if no torch fallback runs."""
SETTINGS = {"max_model_len": 2048, "max_num_seqs": 64, "num_threads": THREADS}
BENCH = Path(__file__).resolve().parents[1]


def load(weights: str) -> tuple[Generate, dict[str, Any]]:
    from pagemill_engine.llm import LLM
    from pagemill_execution.starting.factory import create_runner
    from pagemill_protocol.request.sampling import SamplingParams

    reported: list[str] = []

    def recording(config: Any, _progress: Any) -> Any:
        return create_runner(config, lambda _phase, detail: reported.append(detail))

    with mock.patch("pagemill_engine.llm.create_runner", recording):
        llm = LLM(weights, **SETTINGS)
    if not any(must_say(weights) in detail for detail in reported):
        raise SystemExit(f"the native path fell back: {reported[0]}")

    def generate(jobs: Jobs) -> Tokens:
        params = [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for _, num in jobs]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    return generate, {"load": reported[0]}


def _worker(weights: Path) -> Worker:
    paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Worker([sys.executable, "-m", "peers.pagemill", str(weights)], {"PYTHONPATH": os.pathsep.join(paths)})


def server_with(weights: Path, name: str, engine: Mapping[str, Any], server: Mapping[str, Any]) -> Server:
    """Return the server with settings of the engine and of the server, besides model, name and ports."""
    # Imported here: at the top, 21 MiB of the operator's libraries would count as the worker's memory.
    from pagemill_operator.backends.local.ports import free_port

    port, control_port = free_port(), free_port()
    settings = {
        "engine": {"model": str(weights), "served_names": [name], **engine},
        "server": {"port": port, "control_port": control_port, **server},
    }
    file = FOLDER / "settings" / f"{port}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))
    argv = [sys.executable, "-m", "pagemill_engine.server", "--settings", str(file)]
    url = f"http://127.0.0.1:{port}"
    ready_url = f"http://127.0.0.1:{control_port}/readyz"
    return Server(argv, {}, url, ready_url, name, must_say=must_say(str(weights)))


def _server(weights: Path) -> Server:
    return server_with(weights, "smollm2", SETTINGS, {})


def must_say(weights: str) -> str:
    """Return the text that the load report must contain. A CPU that multiplies bfloat16 must use it, natively or in
    oneDNN.
    """
    has_unit = not {"amx_bf16", "avx512_bf16"}.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    return f"{NATIVE}, " if has_unit and Path(weights).is_dir() else NATIVE


def _peer(precision: Precision, weights: str, how: str) -> Peer:
    return Peer(f"{OURS}-{precision}", precision, weights, how, lambda _uv: None, _worker, _server)


PEERS = [
    _peer("float", "folder", "bfloat16 folder, computed in the CPU's best float type"),
    _peer("int8", "q8_0", "Q8_0 GGUF"),
    _peer("4-bit", "q4_1", "Q4_1 GGUF"),
]

if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))

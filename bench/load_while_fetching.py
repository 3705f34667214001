"""Time to ready of a server whose model comes from a bucket in several files, with what a slow network leaves of it.

A random Llama in float32 in a local S3 server (SeaweedFS), whose connections are bounded; weights are rounded to 4 bits
while they are loaded, which takes time. Each start has an empty cache. `--serve` names the interpreters that are
compared, in turns: of this commit, and of an earlier one that fetches the model before it loads it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from processes import stop
from report import ROOT, emit, median
from safetensors.numpy import save_file

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # `s3_server`, `light_model`

from light_model import CONFIG, write_light_model
from s3_server import KEY, SECRET, CuttingProxy, running_s3_server

from pagemill_operator.backends.local.ports import free_port
from pagemill_protocol.models.decoders import decoder_from_config
from pagemill_protocol.safetensors_header import INDEX_FILE

READY_TIMEOUT_S = 600.0
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}


def write(folder: Path, num_layers: int, num_files: int) -> int:
    """Returns the bytes of its weights; layers in order over the files."""
    write_light_model(folder)
    (folder / "model.safetensors").unlink()
    config = CONFIG | SHAPE | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    random, held, total = np.random.default_rng(0), {}, 0
    shards: list[dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]] = [{} for _ in range(num_files)]
    for name, shape in decoder_from_config(config, folder / "config.json").shapes().items():
        at = int(name.split(".")[2]) * num_files // num_layers if ".layers." in name else 0
        shards[at][name] = random.standard_normal(shape, np.float32) * np.float32(0.02)
        held[name] = f"model-{at:05}.safetensors"
        total += shards[at][name].nbytes
    for at, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{at:05}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": held}))
    return total


def seconds_to_ready(python: str, variables: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        engine = {"model": "s3://models/m", "max_model_len": 256, "num_kv_blocks": 64, "quantization": "int4"}
        settings = {"engine": engine, "server": {"port": free_port(), "control_port": port}}
        path = Path(name, "settings.json")
        path.write_text(json.dumps(settings))
        started_s = time.perf_counter()
        process = subprocess.Popen(
            [python, "-m", "pagemill_engine.server", "--settings", str(path)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, **variables, "PAGEMILL_MODEL_CACHE": str(Path(name, "models"))},
        )
        try:
            while not _is_ready(port):
                if process.poll() is not None or time.perf_counter() - started_s > READY_TIMEOUT_S:
                    raise SystemExit(f"the server of {python} was not ready (exit code {process.returncode})")
                time.sleep(0.05)
            return time.perf_counter() - started_s
        finally:
            stop(process)


def _is_ready(control_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{control_port}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--connection-mib-s", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs="+", default=[sys.executable], help="interpreters with Pagemill")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        folder.mkdir()
        num_bytes = write(folder, args.layers, args.files)
        Path(name, "s3").mkdir()
        with running_s3_server(Path(name, "s3")) as server:
            server.put("models", {f"m/{path.name}": path.read_bytes() for path in folder.iterdir()})
            proxy = CuttingProxy(server.port, bytes_per_s=args.connection_mib_s * 2**20)
            variables = {"AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
            runs: dict[str, list[float]] = {python: [] for python in args.serve}
            for _ in range(args.rounds):
                for python, each in runs.items():
                    each.append(seconds_to_ready(python, variables))
            proxy.close()
    rows = [[python, median(each), min(each)] for python, each in runs.items()]
    columns = ["server", "s to ready, median", "least"]
    emit("load_while_fetching", columns, rows, {"runs": runs, "mib": num_bytes / 2**20, "files": args.files})


if __name__ == "__main__":
    main()

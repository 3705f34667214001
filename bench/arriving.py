"""Measures the time until a model in a bucket is ready, if it is loaded while it is fetched, and if afterwards.

A random Llama behind a real S3 server (SeaweedFS), over a connection of `--mib-s` in total. Each run is `LLM(...)` in a
process of its own with an empty cache, and the ways alternate; the second way calls `resolve_source` first. A third way
loads a model from the cache, which is the time of loading alone. The servers share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from report import ROOT, emit

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # for `s3_server`, `light_model`

from light_model import CONFIG, write_light_model
from s3_server import KEY, SECRET, CuttingProxy, running_s3_server

from pagemill_models.files.safetensors_header import INDEX_FILE
from pagemill_models.spec.decoders import decoder_from_config

MIB = 2**20
HIDDEN, INNER, LAYERS = 1536, 6144, 14
SOURCE = "s3://models/random"
WAYS = TOGETHER, WHOLE_FIRST, THERE = "loaded while fetched", "fetched whole first", "loaded from the cache"


def write_model(folder: Path) -> int:
    """Write a gibibyte of bfloat16 in one file per layer; return the number of bytes."""
    import torch
    from safetensors.torch import save_file

    write_light_model(folder)
    (folder / "model.safetensors").unlink()
    config = CONFIG | {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": 12, "num_key_value_heads": 12, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    held: dict[str, str] = {}
    shards: list[dict[str, Any]] = [{} for _ in range(LAYERS)]
    for name, shape in decoder_from_config(config, folder / "config.json").shapes().items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        shards[layer][name] = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        held[name] = f"model-{layer:05}.safetensors"
    for layer, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{layer:05}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": held}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def work(model: str, dtype: str, *, whole_first: bool) -> None:
    """Load the model in a process of its own; print the seconds and CPU seconds that it takes after the imports."""
    from pagemill import LLM
    from pagemill_models.sources import resolve_source

    began_s, cpu_s = time.perf_counter(), time.process_time()
    if whole_first:
        model = str(resolve_source(model))
    LLM(model, dtype=dtype, max_model_len=64, num_kv_blocks=16, num_threads=2).close()
    print(json.dumps((time.perf_counter() - began_s, time.process_time() - cpu_s)))


def timed(way: str, dtype: str) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one run."""
    command = [sys.executable, __file__, "--worker", way, "--dtype", dtype]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, cpu_s = json.loads(said.splitlines()[-1])
    return seconds, cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib-s", type=float, nargs="+", default=[100, 200])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=WAYS)
    args = parser.parse_args()
    if args.worker:
        work(SOURCE, args.dtype, whole_first=args.worker == WHOLE_FIRST)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        num_bytes = write_model(folder / "model")
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ["PAGEMILL_MODEL_CACHE"] = str(folder / "cache")
        (folder / "s3").mkdir()
        with running_s3_server(folder / "s3") as server:
            for path in sorted((folder / "model").iterdir()):
                server.put("models", {f"random/{path.name}": path.read_bytes()})
            for mib_s in args.mib_s:
                proxy = CuttingProxy(server.port, line_bytes_per_s=mib_s * MIB)
                os.environ["AWS_ENDPOINT_URL"] = proxy.url
                rows += compare(mib_s, num_bytes, folder / "cache", args)
                proxy.close()
    emit("arriving", ["MiB/s", "way", "s", "CPU s", "whole first / it"], rows, {"rows": rows, "mib": num_bytes / MIB})


def compare(mib_s: float, num_bytes: int, cache: Path, args: argparse.Namespace) -> list[list[object]]:
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            if way != THERE:
                shutil.rmtree(cache, ignore_errors=True)
            os.sync()
            runs[way].append(timed(way, args.dtype))
    seconds = {way: median(each[0] for each in found) for way, found in runs.items()}
    ratios = {
        way: median(first[0] / each[0] for first, each in zip(runs[WHOLE_FIRST], found, strict=True))
        for way, found in runs.items()
    }
    return [
        [f"{mib_s:.0f}", way, f"{seconds[way]:.2f}", f"{median(each[1] for each in found):.2f}", f"{ratios[way]:.2f}"]
        for way, found in runs.items()
    ]


if __name__ == "__main__":
    main()

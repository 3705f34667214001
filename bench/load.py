"""Measures the time to read a checkpoint into owned memory: Pagemill's loader and the safetensors library in turns.

A random checkpoint in two files, in the page cache. `load_file` of `safetensors.torch` returns views of a mapping,
whose bytes are read on first use; its time therefore includes a copy of each tensor.

`python bench/load.py --dtype bfloat16`
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from report import emit, median

from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_kernels.arrays import NUMPY_TYPES, FloatType
from pagemill_kernels.huge_pages import empty_weights
from pagemill_models.files.safetensors_header import INDEX_FILE

ROWS, COLUMNS = 4096, 2048
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        in_child(lambda: write(Path(folder), options.dtype, options.mib))
        loaders = loaders_of(Path(folder), options.dtype)
        took = measured(loaders, options.rounds)
    ours = took["pagemill"]
    columns = ["loader", "s", "CPU s", "times ours, s", "times ours, CPU s"]
    ratios = {
        name: [median([other[at] / own[at] for own, other in zip(ours, theirs, strict=True)]) for at in (0, 1)]
        for name, theirs in took.items()
    }
    rows = [
        [name, *(round(median([each[at] for each in pairs]), 3) for at in (0, 1)), *(round(r, 2) for r in ratios[name])]
        for name, pairs in took.items()
    ]
    emit(f"{options.mib} MiB of {options.dtype}", columns, rows, {"dtype": options.dtype, "ratios": ratios})


def write(folder: Path, dtype: str, mib: int) -> None:
    """Write random weights, half of them in each of two files."""
    generator = torch.Generator().manual_seed(0)
    each = ROWS * COLUMNS * getattr(torch, dtype).itemsize
    names = [f"layers.{at}.weight" for at in range(mib * 1024**2 // each)]
    held: dict[str, str] = {}
    for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        drawn = {name: torch.randn(ROWS, COLUMNS, generator=generator).to(getattr(torch, dtype)) for name in part}
        safetensors.torch.save_file(drawn, folder / shard)
        held |= dict.fromkeys(part, shard)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": held}))


def loaders_of(folder: Path, dtype: FloatType) -> dict[str, Callable[[], Any]]:
    files = [folder / shard for shard in SHARDS]

    def ours(wanted: FloatType) -> dict[str, Any]:
        weights = SafetensorsFolder(folder)
        held = {name: empty_weights(shape, NUMPY_TYPES[wanted]) for name, shape in weights.shapes.items()}
        for name, array in held.items():
            weights.read_into(name, array)
        return held

    def of_torch(wanted: torch.dtype) -> dict[str, Any]:
        mapped = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
        return {name: tensor.to(wanted, copy=True) for name, tensor in mapped.items()}

    loaders: dict[str, Callable[[], Any]] = {
        "pagemill": lambda: ours(dtype),
        "safetensors.torch, copied": lambda: of_torch(getattr(torch, dtype)),
    }
    if dtype == "float32":
        loaders["safetensors.numpy"] = lambda: [safetensors.numpy.load_file(file) for file in files]
    else:
        loaders["pagemill, to float32"] = lambda: ours("float32")
        loaders["safetensors.torch, to float32"] = lambda: of_torch(torch.float32)
    return loaders


def measured(loaders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds and CPU seconds of each round after a warm-up round.

    Each round has another order: the speed of new memory depends on what the process before has freed.
    """
    order, names = random.Random(0), list(loaders)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        order.shuffle(names)
        for name in names:
            pair = in_child(functools.partial(timed, loaders[name]))
            if number:
                took[name].append(pair)
    return took


def timed(load: Callable[[], Any]) -> tuple[float, float]:
    started, cpu = time.perf_counter(), time.process_time()
    weights = load()
    took = time.perf_counter() - started, time.process_time() - cpu
    del weights
    return took


def in_child(work: Callable[[], Any]) -> Any:
    """Run in a child process, whose memory is as fresh as a starting engine's."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send(work()))
    child.start()
    result = receiving.recv()
    child.join()
    return result


if __name__ == "__main__":
    main()

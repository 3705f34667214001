"""Measures downloads of a model from a local S3 server (SeaweedFS) into the model cache, in turns with curl.

The cache hashes what it writes and waits for the disk. curl does neither, so it is timed alone, and followed by
`openssl` and `sync`. All share the machine's cores with the server; the median of the rounds counts.
`--connection-mib-s` limits each connection, as distant servers do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from report import ROOT, emit

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # for `s3_server`, `tiny_files`

from s3_server import CuttingProxy, S3Server, running_s3_server
from tiny_files import CONFIG

from pagemill_models.sources.registry import find_kind
from pagemill_models.sources.store.cache import ModelCache

MIB = 2**20
OURS, CURL, SAME_WORK = "cache of models", "curl", "curl, openssl, sync"


def files(count: int, total_mib: int) -> dict[str, bytes]:
    """Return the files of one model; each shard holds one tensor."""
    num_bytes = total_mib * MIB // count
    head = {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    header = json.dumps(head).encode()
    start = len(header).to_bytes(8, "little") + header
    found = {f"model-{at}.safetensors": start + os.urandom(num_bytes) for at in range(count)}
    return {"config.json": json.dumps(CONFIG).encode(), **found}


def download(source: str, target: Path) -> None:
    ModelCache(target).fetch(find_kind(source), source, lambda **_: None)


def curl(urls: list[str], target: Path, *, does_the_same: bool) -> None:
    target.mkdir()
    paths = [str(target / url.rsplit("/", 1)[1]) for url in urls]
    places = [word for url, path in zip(urls, paths, strict=True) for word in ("--output", path, url)]
    subprocess.run(["curl", "--fail", "--silent", "--parallel", *places], check=True, stderr=subprocess.DEVNULL)
    if does_the_same:
        subprocess.run(["openssl", "dgst", "-sha256", *paths], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["sync", *paths], check=True)


def timed(run: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    """Return the seconds and CPU seconds of a run; it begins when the disk is idle."""
    os.sync()
    target = folder / "target"
    started_s, before_s = time.perf_counter(), _cpu_s()
    run(target)
    taken = time.perf_counter() - started_s, _cpu_s() - before_s
    shutil.rmtree(target)
    return taken


def _cpu_s() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(server: S3Server, folder: Path, count: int, args: argparse.Namespace) -> list[list[object]]:
    content = files(count, args.mib)
    server.put("public", {f"{count}/{name}": data for name, data in content.items()})
    limit = args.connection_mib_s
    url = CuttingProxy(server.port, bytes_per_s=limit * MIB).url if limit else server.url
    os.environ["AWS_ENDPOINT_URL"] = url
    urls = [f"{url}/public/{count}/{name}" for name in content]
    ways: dict[str, Callable[[Path], None]] = {
        OURS: lambda target: download(f"s3://public/{count}", target),
        CURL: lambda target: curl(urls, target, does_the_same=False),
        SAME_WORK: lambda target: curl(urls, target, does_the_same=True),
    }
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, run in ways.items():
            runs[way].append(timed(run, folder))
    seconds = {way: median(wall for wall, _ in each) for way, each in runs.items()}
    cpu = {way: median(each_cpu for _, each_cpu in each) for way, each in runs.items()}
    return [
        [count, way, f"{seconds[way]:.2f}", f"{cpu[way]:.2f}", args.mib / seconds[way], seconds[way] / seconds[OURS]]
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--connection-mib-s", type=float, default=0)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name, running_s3_server(Path(name)) as server:
        for count in args.files:
            rows += compare(server, Path(name), count, args)
    columns = ["files", "way", "s", "CPU s", "MiB/s", "times ours"]
    emit("model_download", columns, rows, {"rows": rows, "mib": args.mib})


if __name__ == "__main__":
    main()

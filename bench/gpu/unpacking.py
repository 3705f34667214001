"""Assembles the travelling folder on the bare machine: `python3 bench/gpu/unpacking.py PARTS`. Only the standard
library is there.

Distributions go to `--into`/site, which belongs into PYTHONPATH; the native kernels go to their place in the sources.
All parts are read at once, and what they hold is compiled to bytecode, which saves seconds of every later start.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import os
import shutil
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = "site/"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder for what is unpacked")
    parser.add_argument("--sources", type=Path, default=ROOT, help="the sources, among which native kernels belong")
    parser.add_argument("--compile", action="store_true", help="compile all modules to bytecode on all cores")
    parser.add_argument("parts", nargs="+", type=Path)
    options = parser.parse_args()
    # The library that reads the others is the one packed with gzip.
    readers = [part for part in options.parts if part.suffix == ".gz"]
    for part in readers:
        print(unpack(part, options.into, options.sources), flush=True)
    sys.path.insert(0, str(options.into / SITE))
    with ThreadPoolExecutor(len(options.parts)) as threads:
        others = [part for part in options.parts if part not in readers]
        for line in threads.map(lambda part: unpack(part, options.into, options.sources), others):
            print(line, flush=True)
    if options.compile:
        begin_s = time.perf_counter()
        compileall.compile_dir(options.into / SITE, quiet=2, workers=os.cpu_count() or 1)
        print(f"bytecode: {time.perf_counter() - begin_s:.1f} s", flush=True)
    return 0


def unpack(part: Path, into: Path, sources: Path) -> str:
    """Unpack a part; return what it held and how long that took."""
    begin_s, num_bytes = time.perf_counter(), 0
    with opened(part) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
        for about in archive:
            source = archive.extractfile(about)
            if source is None:
                continue
            target = (into if about.name.startswith(SITE) else sources) / about.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            target.chmod(about.mode)
            num_bytes += about.size
    sizes = f"{part.stat().st_size / 1e6:.1f} MB, {num_bytes / 1e6:.1f} MB unpacked"
    return f"{part.name}: {sizes}, {time.perf_counter() - begin_s:.1f} s"


def opened(part: Path) -> Any:
    if part.suffix == ".gz":
        return gzip.open(part)
    import zstandard

    return zstandard.open(part, dctx=zstandard.ZstdDecompressor(max_window_size=1 << 27))


if __name__ == "__main__":
    sys.exit(main())

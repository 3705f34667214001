"""Builds the folder that travels to a bare machine: `make bench-gpu-parts`. `unpacking` assembles it there.

The parts are archives of what that machine's Python lacks (`travelling.txt`): `engine` for `pagemill serve` and the
tests, with the native kernels that were compiled here, and `vllm` in a few more, without what one such device never
loads: sources of other kernels, an attention library for older devices, and code for other architectures (`fatbins`).
No part is larger than what travels at once. Each step reports its size and its seconds.

Parts are compressed with zstd over a long window, because kernels for one operation resemble each other: xz makes them
a quarter smaller, in a hundred times as long. The library that reads them there is a part itself.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import fatbins

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ROOT / ".pagemill" / "gpu-parts"
BUILT = ROOT / ".pagemill" / "gpu-site"
"""Where distributions are installed before they are packed."""
LIST = HERE / "travelling.txt"
NATIVE = Path("kernels/pagemill_kernels/cpu/lib")
MAX_BYTES = 60_000_000
PYTHON, PLATFORM, ARCHITECTURE = "3.12", "x86_64-manylinux_2_34", 90
LEFT_OUT = (
    *(
        "*.hpp",
        "*.cuh",
        "*.h",
        "*.inl",
        "*.pyc",
        "*.pyi",
        "bin/*",
        "*.dist-info/RECORD",
        "*/3rdparty/*",
        "*/fused_moe/configs/*",
    ),
    *("*/_vllm_fa2_C.abi3.so", "*/_flashmla_*.so", "*/_qutlass_C.abi3.so", "*/_moe_C*.so", "*/deep_gemm/*.so"),
    *("*/vllm-rs", "*/fmha_sm100/*", "*/swagger-ui-bundle.js", "obstore/*", "*/hadamards.safetensors"),
)
"""What neither engine loads on such a device for the models that are measured (vLLM's experts need `_moe_C`)."""
LIBRARIES = {"vllm-attention": "*/_vllm_fa3_C.abi3.so", "vllm-kernels": "vllm/_C_*.abi3.so"}
"""vLLM's large libraries, each in a part of its own, which is built once."""
MODULES = (
    "msgspec, zmq, pydantic, uvicorn, httptools, orjson, llguidance, pytest_asyncio, pagemill.main, "
    "pagemill_engine.server.main",
    "vllm.entrypoints.llm, vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.model_executor.models.qwen3, "
    "vllm.model_executor.models.llama, vllm.v1.worker.gpu_worker",
)
"""What must be importable: of the engine, and of vLLM, whose package imports nothing by itself."""
READER = "zstandard"
"""The group of the library that reads the other parts, which is packed with gzip."""
LEVEL, WINDOW_LOG = 9, 27


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default=".uv/bin/uv", help="uv, which installs the distributions")
    parser.add_argument("--python", help="a Python 3.12 with torch 2.11 that imports what was packed, to check it")
    parser.add_argument("groups", nargs="*", default=[READER, "engine", "vllm"], help="of travelling.txt; default: all")
    options = parser.parse_args()
    PARTS.mkdir(parents=True, exist_ok=True)
    install(options.uv, READER, BUILT / "here", [])
    sys.path.insert(0, str(BUILT / "here"))
    for group in options.groups:
        folder = BUILT / group
        with step(f"install {group}", folder):
            install(options.uv, group, folder, ["--python-version", PYTHON, "--python-platform", PLATFORM])
        pack(group, folder)
    (PARTS / "commit").write_text(_commit())
    for path in sorted(PARTS.glob("*.tar.*")):
        if path.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} travel at once")
    if options.python is not None:
        with step("assemble and import", PARTS):
            assemble(options.python)
    return 0


@contextmanager
def step(name: str, result: Path) -> Iterator[None]:
    """Report the seconds of a step and the size of its result."""
    begin_s = time.perf_counter()
    yield
    print(f"{name}: {size_of(result) / 1e6:,.1f} MB, {time.perf_counter() - begin_s:.1f} s", flush=True)


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())


def groups() -> dict[str, list[str]]:
    """Return the distributions of each group in `travelling.txt`."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in LIST.read_text().splitlines():
        if head := re.fullmatch(r"\[(\w+)\]", line):
            name = head[1]
            found[name] = []
        elif line and not line.startswith("#"):
            found[name].append(line)
    return found


def install(uv: str, group: str, folder: Path, target: list[str]) -> None:
    """Install a group's distributions for a target, unless they are there already."""
    wanted = "\n".join(groups()[group])
    mark = folder / "installed.txt"
    if mark.exists() and mark.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    argv = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--system-certs",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        str(folder),
    ]
    subprocess.run([*argv, *target, *groups()[group]], check=True)
    mark.write_text(wanted)


def pack(group: str, folder: Path) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    kept = [path for path in files if not any(fnmatch(f"/{path.relative_to(folder)}", f"/{each}") for each in LEFT_OUT)]
    if group == "vllm":
        for part, pattern in LIBRARIES.items():
            chosen = [path for path in kept if fnmatch(f"/{path.relative_to(folder)}", f"/{pattern}")]
            kept = [path for path in kept if path not in chosen]
            target = PARTS / f"{part}.tar.zst"
            if not target.exists() or target.stat().st_mtime < (folder / "installed.txt").stat().st_mtime:
                with step(f"pack {part}", target):
                    write(target, {f"site/{path.relative_to(folder)}": path for path in chosen})
    entries = {f"site/{path.relative_to(folder)}": path for path in kept}
    if group == "engine":
        entries |= {str(NATIVE / path.name): path for path in sorted((ROOT / NATIVE).glob("*.so"))}
        entries |= dict(own_metadata())
    target = PARTS / f"{group}.tar.{'gz' if group == READER else 'zst'}"
    with step(f"pack {group}", target):
        write(target, entries)


def own_metadata() -> Iterator[tuple[str, Path]]:
    """Yield what says the versions and entry points of our packages, whose sources are on the path there."""
    for distribution in metadata.distributions():
        name = str(distribution.name)
        if name.split("-")[0] != "pagemill" or name == "pagemill-workspace":
            continue
        for file in ("METADATA", "entry_points.txt"):
            path = (
                Path(str(distribution.locate_file("")))
                / f"{name.replace('-', '_')}-{distribution.version}.dist-info"
                / file
            )
            if path.exists():
                yield f"site/{path.parent.name}/{file}", path


def content_of(path: Path) -> bytes:
    """Return a file; a library without symbols for debuggers and without code for other devices."""
    if path.suffix != ".so":
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        subprocess.run(["strip", "--strip-unneeded", "-o", str(copy), str(path)], check=True)
        library = bytearray(copy.read_bytes())
    fatbins.blank_others(library, ARCHITECTURE)
    return bytes(library)


def write(target: Path, entries: dict[str, Path]) -> None:
    """Write an archive; until it is whole it has another name."""
    draft = target.with_name(f"{target.name}.new")
    with packed(draft, target.suffix) as file, tarfile.open(fileobj=file, mode="w|") as archive:
        for name, path in entries.items():
            content = content_of(path)
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(content), 0o755 if path.suffix == ".so" else 0o644
            archive.addfile(about, io.BytesIO(content))
    draft.replace(target)


def packed(path: Path, suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.open(path, "wb")
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=WINDOW_LOG, enable_ldm=True)
    return zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(compression_params=parameters))


def assemble(python: str) -> None:
    """Assemble the parts under that Python and import what they hold."""
    site = BUILT / "assembled"
    shutil.rmtree(site, ignore_errors=True)
    unpack = [python, str(HERE / "unpacking.py"), "--into", str(site), *_parts()]
    subprocess.run(unpack, check=True)
    libraries = ("libs/protocol", "libs/models", "libs/servers", "libs/api", "libs/kube", "libs/routing")
    ours = ("kernels", *libraries, "execution", "engine", "crds", "gateway", "operator", "simulator", "cli")
    folders = [site / "site", *(ROOT / name for name in ours)]
    there = MODULES if (site / "site" / "vllm").exists() else MODULES[:1]
    for modules in there:
        code = f"import sys; sys.path[:0] = {list(map(str, folders))!r}; import {modules}"
        subprocess.run([python, "-c", code], check=True)


def _parts() -> Iterable[str]:
    return map(str, sorted(PARTS.glob("*.tar.*")))


def _commit() -> str:
    argv = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())

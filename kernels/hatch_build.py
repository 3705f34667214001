"""Compiles the native CPU kernels when the package is built, one library per instruction-set level.

Wheels contain every level. An installation from a source tree compiles only the highest level of this processor, or the
levels that `PAGEMILL_KERNEL_LEVELS` selects: `fitting` (all that this processor supports) or `all`. `CXX` selects
another compiler, `PAGEMILL_KERNEL_MACHINE` another target machine. Without a compiler the package is built without
kernels and uses torch; `pagemill_kernels.cpu.library` reports this.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
OWN_FLAGS = {"sampling.cpp": ("-ffp-contract=off",)}
"""Flags of files whose results must equal numpy's bit by bit, which fused multiply-add would change."""
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v3": ("-march=x86-64-v3",),
        "x86-64-v4": ("-march=x86-64-v4",),
        "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    },
    "aarch64": {"armv8-a": ("-march=armv8-a",)},
}
"""Levels and their compiler options by machine. At run time the highest level that the processor supports is loaded."""
LEVELS_SETTING, MACHINE_SETTING = "PAGEMILL_KERNEL_LEVELS", "PAGEMILL_KERNEL_MACHINE"


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = _compiler()
        machine = os.environ.get(MACHINE_SETTING) or platform.machine()
        known = LEVELS.get(machine, {}) if sys.platform == "linux" else {}
        if compiler is None or not known:
            self.app.display_warning("pagemill-kernels: no C++ compiler for this platform; the torch fallback will run")
            return
        package = Path(self.root) / "pagemill_kernels" / "cpu"
        library_dir = package / "lib"
        library_dir.mkdir(exist_ok=True)
        wanted = list(known) if version == "standard" else _levels_here(Path(self.root), known)
        for other in set(library_dir.glob("*.so")) - {_library(library_dir, level) for level in wanted}:
            other.unlink()  # of other sources, perhaps
        for level, error in compile_levels(compiler, {level: known[level] for level in wanted}, package).items():
            self.app.display_warning(
                f"pagemill-kernels: {level} did not compile; a lower level or torch runs instead\n{error}"
            )
        build_data["artifacts"].append("pagemill_kernels/cpu/lib/*.so")
        build_data["pure_python"] = False
        # ctypes loads them: the machine matters, no Python version does. `make dist` puts the oldest glibc for `linux`.
        build_data["tag"] = f"py3-none-linux_{machine}"


def compile_levels(compiler: list[str], levels: dict[str, tuple[str, ...]], package: Path) -> dict[str, str]:
    """Compile all sources on all cores. Return the compiler's messages for levels that failed."""
    sources = sorted((package / "src").glob("*.cpp"), key=lambda source: -source.stat().st_size)
    cores = len(os.sched_getaffinity(0))
    failed = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as threads:
        objects = {}
        for level, options in levels.items():
            command = [*compiler, *FLAGS, *_spelled(compiler, options)]
            targets = (Path(folder, f"{level}.{source.stem}.o") for source in sources)
            objects[level] = list(map(threads.submit, repeat(_compile), repeat(command), sources, targets))
        for level, compiled in objects.items():
            try:
                _link(compiler, compiled, package / "src" / "exports.map", _library(package / "lib", level))
            except subprocess.CalledProcessError as error:
                failed[level] = error.stderr
                _library(package / "lib", level).unlink(missing_ok=True)  # of older sources
    return failed


def _compile(command: list[str], source: Path, target: Path) -> Path:
    command = [*command, *OWN_FLAGS.get(source.name, ()), "-c", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def _link(compiler: list[str], compiled: list[Future[Path]], exports: Path, target: Path) -> None:
    partial = target.with_suffix(".partial")
    options = ("-shared", "-pthread", "-s", f"-Wl,--version-script={exports}", "-o", str(partial))
    command = [*compiler, *options, *(str(each.result()) for each in compiled)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    partial.replace(target)


def _library(library_dir: Path, level: str) -> Path:
    return library_dir / f"libpagemill_cpu.{level}.so"


def _spelled(compiler: list[str], options: tuple[str, ...]) -> list[str]:
    """Return the options in the compiler's spelling: Zig uses `_` in names of processors, and none for 64-bit Arm."""
    if not any("zig" in word for word in compiler):
        return list(options)
    march = "-march="
    named = (march + each.removeprefix(march).replace("-", "_") if each.startswith(march) else each for each in options)
    return [option for option in named if option != "-march=armv8_a"]


def _compiler() -> list[str] | None:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path), None)


def _levels_here(root: Path, known: dict[str, tuple[str, ...]]) -> list[str]:
    choice = os.environ.get(LEVELS_SETTING) or "highest"
    if choice == "all":
        return list(known)
    sys.path.insert(0, str(root))
    try:
        from pagemill_kernels.cpu.processor import fitting_levels
    finally:
        sys.path.remove(str(root))
    # A processor that fits none still gets the library that the others build upon: torch runs, and says why.
    fitting = list(fitting_levels()) or [next(iter(known))]
    return fitting if choice == "fitting" else fitting[:1]

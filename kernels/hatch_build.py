"""Compiles the native CPU kernels while the package is built, one library for each instruction-set level.

Without a C++ compiler the package is built all the same and runs on torch; `pagemill_kernels.cpu.library` says so.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "linear.cpp",
    "dots.cpp",
    "bfloat16.cpp",
    "pack.cpp",
    "attention.cpp",
    "attention_bfloat16.cpp",
    "experts.cpp",
    "fused.cpp",
    "activation.cpp",
    "sampling.cpp",
    "layer.cpp",
)
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v3": ("-march=x86-64-v3",),
        "x86-64-v4": ("-march=x86-64-v4",),
        "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    },
    "aarch64": {"armv8-a": ("-march=armv8-a",)},
}
"""Levels and what the compiler needs for them, by machine; at run time the highest that the processor has is loaded."""


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
        levels = LEVELS.get(platform.machine(), {}) if sys.platform == "linux" else ()
        if compiler is None or not levels:
            self.app.display_warning("pagemill-kernels: no C++ compiler for this platform; the torch fallback will run")
            return
        package = Path(self.root) / "pagemill_kernels" / "cpu"
        library_dir = package / "lib"
        library_dir.mkdir(exist_ok=True)
        for level, options in levels.items():
            target = library_dir / f"libpagemill_cpu.{level}.so"
            sources = [str(package / "src" / name) for name in SOURCES]
            partial = target.with_suffix(".partial")
            command = [compiler, *FLAGS, *options, "-o", str(partial), *sources]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError as error:
                self.app.display_warning(
                    f"pagemill-kernels: {level} did not compile; a lower level or torch runs instead\n{error.stderr}"
                )
                continue
            partial.replace(target)
        build_data["artifacts"].append("pagemill_kernels/cpu/lib/*.so")
        build_data["pure_python"] = False
        # ctypes loads them: the machine matters, no Python version does. `make dist` puts the oldest glibc for `linux`.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

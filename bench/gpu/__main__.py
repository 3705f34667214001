"""GPU benchmarks on a machine with one NVIDIA device: `python3 bench/gpu`, or `make bench-gpu`.

Needs torch, Triton, numpy and safetensors, no network and no installation of ours. Every section runs in a process of
its own with a limit of its own, so that one that fails or hangs takes nothing else with it; results.md and results.json
are written anew after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paths
from measuring import Device
from results import Section, about, document
from sections import SECTIONS

LIMIT_S = 470.0
"""Of one section."""
OUT = paths.ROOT / ".pagemill" / "bench-gpu"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu", description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME",
                        help=f"of {', '.join(SECTIONS)}; default: all")  # fmt: skip
    parser.add_argument("--sizes", choices=["full", "tiny"], default="full", help="tiny: only that everything runs")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results.md and results.json")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = options.sizes == "tiny"
    device = Device(tiny)
    if options.result is not None:
        options.result.write_text(json.dumps(run(device, options.sections[0]).as_json()))
        return 0
    found: list[Section] = []
    for name in options.sections:
        print(f"== {name}", flush=True)
        # Tiny sections take less than the imports of another process.
        found.append(run(device, name) if tiny else run_apart(name))
        print(found[-1].markdown(), flush=True)
        write(options.out, about(device), found)
    print(f"written: {options.out}/results.md and results.json")
    return 1 if any(section.error for section in found) else 0


def run(device: Device, name: str) -> Section:
    section = Section(name)
    begin_s = time.perf_counter()
    try:
        SECTIONS[name](device, section)
    except Exception as problem:
        section.error = f"{type(problem).__name__}: {problem}"
    section.seconds = time.perf_counter() - begin_s
    return section


def run_apart(name: str) -> Section:
    """A crash of the device or a section without an end is that section's alone."""
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "section.json"
        argv = [sys.executable, str(paths.HERE), "--sections", name, "--result", str(result)]
        try:
            status: Any = subprocess.run(argv, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = f"nothing; it was ended after {LIMIT_S:.0f} s"
        if result.exists():
            return Section.from_json(json.loads(result.read_text()))
    return Section(name, time.perf_counter() - begin_s, f"the process returned {status}")


def write(folder: Path, machine: dict[str, str], sections: list[Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(document(machine, sections))
    found = {"machine": machine, "sections": [section.as_json() for section in sections]}
    (folder / "results.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())

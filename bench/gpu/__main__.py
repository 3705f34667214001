"""GPU benchmarks on a machine with one NVIDIA device: `python3 bench/gpu`, or `make bench-gpu`.

They need torch, Triton, numpy and safetensors, but no network and no installation of Pagemill. Every section runs in a
process of its own with a time limit, so that a failure or a hang affects only that section; results.md and results.json
are written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import paths
from measuring import Device
from results import Section, about, document, reported
from sections import SECTIONS

LIMIT_S = 470.0
"""Seconds that one section may take."""
OUT = paths.ROOT / ".pagemill" / "bench-gpu"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu", description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME",
                        help=f"sections to run, of {', '.join(SECTIONS)}; default: all")  # fmt: skip
    parser.add_argument(
        "--sizes", choices=["full", "tiny"], default="full", help="tiny: only check that everything runs"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results.md and results.json")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = options.sizes == "tiny"
    device = Device(tiny)
    if options.result is not None:
        run(device, options.sections[0], options.result)
        return 0
    found: list[Section] = []
    for name in options.sections:
        print(f"== {name}", flush=True)
        # A tiny section takes less time than the imports of another process.
        found.append(run(device, name) if tiny else run_apart(name))
        print(found[-1].markdown(), flush=True)
        write(options.out, about(device), found)
    print(f"written: {options.out}/results.md and results.json")
    return 1 if any(section.error for section in found) else 0


def run(device: Device, name: str, result: Path | None = None) -> Section:
    """Run one section; `result` is the file that always holds what it has found so far."""
    section = Section(name)
    begin_s = time.perf_counter()

    def keep() -> None:
        section.seconds = time.perf_counter() - begin_s
        if result is not None:
            written = result.with_suffix(".new")
            written.write_text(json.dumps(section.as_json()))
            written.replace(result)

    section.changed = keep
    try:
        SECTIONS[name](device, section)
    except Exception as problem:
        traceback.print_exc()
        section.error = reported(problem, 2000)
    keep()
    return section


def run_apart(name: str, limit_s: float = LIMIT_S) -> Section:
    """Run a section in a process of its own, so that a crash or a hang affects it alone; keep what it had found."""
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "section.json"
        argv = [sys.executable, str(paths.HERE), "--sections", name, "--result", str(result)]
        # The process has a group of its own: tests and engines that it started must not outlive it on the device.
        process = subprocess.Popen(argv, start_new_session=True)
        try:
            ended = process.wait(limit_s)
            problem = "" if ended == 0 else f"the process returned {ended}"
        except subprocess.TimeoutExpired:
            problem = f"it was ended after {limit_s:.0f} s"
        finally:
            end_group(process)
        found = Section.from_json(json.loads(result.read_text())) if result.exists() else Section(name)
    if problem:
        found.seconds, found.error = time.perf_counter() - begin_s, problem
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def write(folder: Path, machine: dict[str, str], sections: list[Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(document(machine, sections))
    found = {"machine": machine, "sections": [section.as_json() for section in sections]}
    (folder / "results.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())

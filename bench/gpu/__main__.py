"""GPU benchmarks on a machine with one NVIDIA device: `python3 bench/gpu`, or `make bench-gpu`.

They need torch, Triton, numpy and safetensors, but no network and no installation of Pagemill; the sections that serve
or run tests need the travelling folder as well (`packing`). Every section runs in a process of its own with a time
limit, so that a failure or a hang affects only that section. Each row is written as soon as it is known. A later run
leaves out what an earlier one has measured of the same code on such a card.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import paths
import torch
import triton
from case import reported
from measuring import Device
from plan import SECTIONS
from rows import ALL, Machine, Row, Section, append, code_of, read

RECORDED = paths.HERE / "rows.json"
"""The rows of all runs, which the repository keeps."""
OUT = paths.STATE / "rows"


def main() -> int:
    options = _options()
    is_dry_run = options.sizes == "none"
    if is_dry_run:
        import dry_run

        dry_run.compute_nothing()
    device = Device(options.sizes != "full", is_dry_run=is_dry_run)
    machine = about(device, options.commit)
    if options.alone:
        return 0 if run(device, machine, options.sections[0], options.out, options.again) else 1
    begin_s = time.monotonic()
    failed = []
    for name in options.sections:
        left_s = 60 * options.minutes - (time.monotonic() - begin_s)
        entry = SECTIONS[name]
        if left_s < entry.least_s:
            print(f"== {name}: left out, {left_s:.0f} s are left", flush=True)
            continue
        print(f"== {name}, at most {min(left_s, entry.budget_s):.0f} s", flush=True)
        begun_s = time.monotonic()
        # A tiny section takes less time than the imports of another process.
        if device.tiny:
            fine = run(device, machine, name, options.out, options.again)
        else:
            fine = run_apart(name, options, machine, min(left_s, entry.budget_s))
        print(f"== {name}: {time.monotonic() - begun_s:.0f} s{'' if fine else ', failed'}", flush=True)
        failed += [] if fine else [name]
    print(f"written: {options.out / ALL}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu", description=__doc__)

    def option(name: str, words: str, **more: Any) -> None:
        parser.add_argument(name, help=words, **more)

    names = f"sections to run, of {', '.join(SECTIONS)}; default: all"
    option("--sections", names, nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME")
    sizes = "tiny: only check that everything runs; none: run all code and compute nothing"
    option("--sizes", sizes, choices=["full", "tiny", "none"], default="full")
    option("--minutes", "time of the whole run; sections that do not fit are left out", type=float, default=60.0)
    option("--again", "measure what an earlier run has measured, too", action="store_true")
    option("--commit", "commit that is measured; default: what git or the folder says", default="")
    option("--out", f"folder of {ALL} and of a file for each section", type=Path, default=OUT)
    option("--alone", argparse.SUPPRESS, action="store_true")
    return parser.parse_args()


def run(device: Device, machine: Machine, name: str, out: Path, again: bool) -> bool:
    """Run one section in this process; return whether it succeeded. Its error is a row."""
    code = code_of(SECTIONS[name].sources)
    section = Section(name, machine, code, out)
    known = read([RECORDED, out / f"{name}.jsonl"])
    section.ever = {row.shape for row in known if not row.error}
    if not again:
        section.before = {row.key: row for row in known if (row.code, row.card) == (code, machine.card)}
    try:
        SECTIONS[name].run(device, section)
    except Exception as problem:
        traceback.print_exc()
        section.add("the section", "", None, error=reported(problem, 600))
        return False
    return True


def run_apart(name: str, options: argparse.Namespace, machine: Machine, limit_s: float) -> bool:
    """Run a section in a process of its own, so that a crash or a hang affects it alone; what it wrote stays."""
    argv = [sys.executable, str(paths.HERE), "--sections", name, "--alone", "--out", str(options.out)]
    argv += ["--commit", machine.commit, *(["--again"] if options.again else [])]
    # The process has a group of its own: tests and engines that it started must not outlive it on the device.
    process = subprocess.Popen(argv, start_new_session=True)
    try:
        ended = process.wait(limit_s)
        problem = "" if ended in (0, 1) else f"the process returned {ended}"
    except subprocess.TimeoutExpired:
        ended, problem = 1, f"it was ended after {limit_s:.0f} s"
    finally:
        end_group(process)
    if problem:
        about_it = vars(machine) | {"code": code_of(SECTIONS[name].sources), "section": name}
        append(options.out, Row(**about_it, shape="the section", unit="", ours=None, error=problem))
        print(f"{name}: {problem}", flush=True)
    return ended == 0


def end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def about(device: Device, commit: str) -> Machine:
    """Return what identifies the machine and the sources."""
    software = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Machine(device.name, _driver() if device.on_gpu else "", software, commit or _commit(), date)


def _driver() -> str:
    return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0]


def _commit() -> str:
    """Return the commit by git, or, in a copy without its history, what was packed beside it."""
    packed = paths.ROOT / ".pagemill" / "gpu-parts" / "commit"
    return _output(["git", "-C", str(paths.ROOT), "rev-parse", "--short=8", "HEAD"]) or (
        packed.read_text().strip() if packed.exists() else ""
    )


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())

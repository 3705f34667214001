"""The output of every benchmark: the machine, a table, and one last line of JSON for scripts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Return what identifies the machine and the versions."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    cleaned = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(cleaned.get("flags", "").split())
    shown = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": cleaned.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "simd": " ".join(flag for flag in shown if flag in flags),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "pagemill": _commit(),
        "load_1min": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def emit(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], result: dict[str, Any]) -> None:
    """Print the table, then `result` with the machine as one line of JSON."""
    about = machine()
    texts = [[_show(value) for value in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *texts, strict=True)]
    print(f"{name} on {about['cores']} cores of {about['cpu']} ({about['simd']}), torch {about['torch']}")
    for row in [list(columns), *texts]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print(json.dumps({"bench": name, **result, "machine": about}), flush=True)


def progress(line: str) -> None:
    """Write progress to stderr: stdout ends with the table and one line of JSON."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table for the documentation; cells are shown as they are."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def run_peer(script: str, *arguments: str, timeout_s: float) -> dict[str, Any] | str:
    """Run one peer in its own process; return its last line of JSON, or a short text if it failed."""
    argv = [sys.executable, script, *arguments]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=timeout_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"not finished in {timeout_s:.0f} s"
    if done.returncode != 0:
        return f"failed with exit code {done.returncode}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def peak_rss_mib() -> float:
    """Return the peak RSS of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def _show(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or _version("pagemill")

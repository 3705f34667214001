"""Checks whether a change is slower: compares a few figures of the working tree with those of an earlier commit.

Each is measured by its own `gate_figures`, as the names of packages and functions may differ between them; both run in
processes that stay alive and take turns, so that other work on the machine affects both. Figures are CPU time, which
other processes disturb least. A figure's ratio is the median over all pairs; the command fails if it is below the
limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gate_figures import FIGURES
from peers.process import PeerProcess
from report import ROOT, emit, median

NATIVE_SOURCES = "kernels/pagemill_kernels/cpu/src"
NATIVE_LIBRARIES = "kernels/pagemill_kernels/cpu/lib"
COMPILE = """
import sys
from types import SimpleNamespace
# The environment has no build backend, and of the hook's class only what the commit itself wrote is called.
sys.modules["hatchling.builders.hooks.plugin.interface"] = SimpleNamespace(BuildHookInterface=object)
import hatch_build
build = SimpleNamespace(root=".", app=SimpleNamespace(display_warning=print))
hatch_build.NativeKernels.initialize(build, "", {"artifacts": []})
"""
START_TIMEOUT_S = 300.0
FIGURE_TIMEOUT_S = 300.0


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def default_base() -> str:
    """Return the last commit if the working tree differs from it, or else the one before."""
    return "HEAD" if git("status", "--porcelain", "--untracked-files=no") else "HEAD~1"


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check out a commit with its native kernels into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="pagemill-gate-") as name:
        tree = Path(name) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            if subprocess.run(["git", "diff", "--quiet", revision, "--", NATIVE_SOURCES], cwd=ROOT).returncode == 0:
                shutil.copytree(ROOT / NATIVE_LIBRARIES, tree / NATIVE_LIBRARIES, dirs_exist_ok=True)
            else:
                print(f"compiling the native kernels of {revision}", flush=True)
                subprocess.run([sys.executable, "-c", COMPILE], cwd=tree / "kernels", check=True)
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def start(figure: str, tree: Path, log: Path) -> PeerProcess:
    packages = [path.parent for pattern in ("*", "libs/*") for path in tree.glob(f"{pattern}/pyproject.toml")]
    paths = os.pathsep.join(map(str, [*packages, tree / "bench"]))
    argv = [sys.executable, str(tree / "bench" / "gate_figures.py"), figure, "--packages", str(tree)]
    process = PeerProcess(argv, {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}, log)
    process.answer(START_TIMEOUT_S)
    return process


def measure(figure: str, base: Path, num_pairs: int, logs: Path) -> tuple[list[float], list[float]]:
    """Return the milliseconds of CPU time of each pair: of the base, and of the working tree."""
    found: dict[str, list[float]] = {"base": [], "ours": []}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, tree in (("base", base), ("ours", ROOT)):
            processes[name] = start(figure, tree, logs / f"{figure}-{name}.log")
            stack.callback(processes[name].stop)
        for number in range(num_pairs):
            for name in ("base", "ours") if number % 2 else ("ours", "base"):
                found[name].append(processes[name].ask({}, FIGURE_TIMEOUT_S)["cpu_ms"])
    return found["base"], found["ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", default=default_base(), help="commit to compare with (default: the last one that differs)"
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--limit", type=float, default=0.95, help="smallest ratio of the base's time to ours that passes"
    )
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}: at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes are ended and the worktree is removed
    logs = ROOT / ".pagemill" / "gate"
    rows, ratios = [], {}
    with checked_out(args.base) as base:
        for figure in args.figures:
            before, after = measure(figure, base, args.pairs, logs)
            pairs = sorted(old / new for old, new in zip(before, after, strict=True))
            ratios[figure] = median(pairs)
            spread = f"{pairs[len(pairs) // 4]:.3f} to {pairs[-1 - len(pairs) // 4]:.3f}"
            rows.append([FIGURES[figure].what, median(before), median(after), ratios[figure], spread])
    base_name = git("rev-parse", "--short", args.base)
    emit("gate", ["ms of CPU", base_name, "now", "ratio", "middle half"], rows, {"base": base_name, "ratios": ratios})
    slower = [figure for figure, ratio in ratios.items() if ratio < args.limit]
    if slower:
        raise SystemExit(f"slower than {base_name} by more than {1 - args.limit:.0%}: {', '.join(slower)}")


if __name__ == "__main__":
    main()

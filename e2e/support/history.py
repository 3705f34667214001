"""The chart as earlier commits had it, for upgrades from there."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = "charts/pagemill"
MAX_COMMITS = 20


def previous_chart(folder: Path, reference: str) -> Path:
    """Unpack the chart of `reference` into `folder`.

    Where it is the same as today's, the newest commit with another one is taken: an upgrade must change something.
    """
    today = _git("rev-parse", "--verify", f"HEAD:{CHART}").strip()
    older = _git("rev-list", f"--max-count={MAX_COMMITS}", reference, "--", CHART).split()
    for commit in [reference, *older]:
        if _git("rev-parse", "--verify", f"{commit}:{CHART}").strip() != today:
            return _unpacked(commit, folder)
    raise AssertionError(f"no other chart than today's among {reference} and its ancestors")


def _unpacked(commit: str, folder: Path) -> Path:
    done = subprocess.run(["git", "archive", commit, CHART], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / CHART


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr} (the upgrade test needs the history)"
    return done.stdout

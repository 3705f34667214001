"""The platform of earlier commits, from which upgrade tests start."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = "charts/pagemill"
MAX_COMMITS = 20


@dataclass(frozen=True)
class Previous:
    """The files and images of one earlier commit."""

    commit: str
    root: Path
    """The folder of the commit's files."""

    @property
    def chart(self) -> Path:
        return self.root / CHART

    @property
    def image_tag(self) -> str:
        return f"at-{self.commit[:12]}"


def previous(folder: Path, reference: str) -> Previous:
    """Unpack `reference` into `folder`.

    If its chart equals the current one, unpack the newest commit with a different chart: an upgrade must change the
    chart.
    """
    today = _git("rev-parse", "--verify", f"HEAD:{CHART}").strip()
    older = _git("rev-list", f"--max-count={MAX_COMMITS}", reference, "--", CHART).split()
    for commit in [_git("rev-parse", "--verify", reference).strip(), *older]:
        if _git("rev-parse", "--verify", f"{commit}:{CHART}").strip() != today:
            _unpack(commit, folder)
            return Previous(commit, folder)
    raise AssertionError(f"{reference} and its ancestors have no chart that differs from the current one")


def _unpack(commit: str, folder: Path) -> None:
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr} (the upgrade test needs the history)"
    return done.stdout

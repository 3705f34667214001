"""The packages of the previous release, which run together with the current ones: from its wheels or from git.

`make previous-wheels` downloads the wheels. Without them, the files of the last tag are taken from git, or, before the
first tagged release, those of the commit that stands for it. Kernels are compiled, so a checkout uses the current ones.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".uv" / "previous-wheels"
STANDS_FOR_A_RELEASE = "a261bd760e422ba8048ad61af26eae7a253cd35a"
"""The first commit without what served earlier commits only; nothing before it was released."""
LIBS = tuple(f"libs/{name}" for name in ("protocol", "models", "api", "servers", "kube", "routing"))
FOLDERS = (*LIBS, "crds", "execution", "engine", "gateway", "operator", "cli")


@dataclass(frozen=True)
class Release:
    """The packages of one release."""

    name: str
    paths: tuple[Path, ...] = ()
    """The folders of its packages, which precede the environment's; none for the current release."""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.paths))} if self.paths else {**os.environ}

    def run(self, program: str, *arguments: str, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        """Run a short program that imports this release's packages; return its output."""
        return self.begin(program, *arguments).end(stdin, timeout_s=timeout_s)

    def begin(self, program: str, *arguments: str) -> Program:
        """Start a short program, which may import and then wait for its standard input."""
        command = [sys.executable, "-c", program, *arguments]
        pipe = subprocess.PIPE
        return Program(self, subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe))


class Program(NamedTuple):
    """A short program that runs with the packages of a release."""

    release: Release
    process: subprocess.Popen[bytes]

    def end(self, stdin: bytes = b"", *, timeout_s: float = 60.0) -> bytes:
        """Give it its standard input; return its output."""
        with self.process:
            try:
                output, errors = self.process.communicate(stdin, timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        assert self.process.returncode == 0, f"{self.release.name}: {errors.decode(errors='replace')}"
        return output


TODAY = Release("today")


@pytest.fixture(scope="session")
def previous_release(request: pytest.FixtureRequest) -> Release:
    """Return the previous release; skip the test if neither wheels nor git history exist."""
    cache: Path = request.config.cache.mkdir("previous-release")  # type: ignore[union-attr]
    if wheels := sorted(WHEELS.glob("*.whl")):
        digest = hashlib.sha256(b"".join(wheel.read_bytes() for wheel in wheels)).hexdigest()
        folder = cache / digest[:40]
        return Release("the previous release's wheels", (_unpacked_wheels(wheels, folder),))
    commit = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^") or STANDS_FOR_A_RELEASE
    commit = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if not commit:
        pytest.skip(
            "the previous release is neither in .uv/previous-wheels (`make previous-wheels`) nor in the history of "
            "this checkout (`git fetch --unshallow --tags`)"
        )
    root = _unpacked_commit(commit, cache / commit)
    return Release(f"commit {commit[:12]}", tuple(root / name for name in FOLDERS if (root / name).exists()))


def _unpacked_wheels(wheels: list[Path], folder: Path) -> Path:
    if not (folder / "complete").exists():
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        (folder / "complete").touch()
    return folder


def _unpacked_commit(commit: str, folder: Path) -> Path:
    if not (folder / "complete").exists():
        folders = [name for name in FOLDERS if _git("rev-parse", "--verify", "--quiet", f"{commit}:{name}")]
        done = subprocess.run(["git", "archive", commit, *folders], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        (folder / "complete").touch()
    return folder


def _git(*arguments: str) -> str:
    """Return git's output, or "" if git fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""

"""Creates the peers' environments: one per engine below `.pagemill/peers`, kept until that folder is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from report import ROOT

FOLDER = ROOT / ".pagemill" / "peers"
UV_FLAGS = ("--no-python-downloads", "--system-certs")
TIMEOUT_S = 3600


class InstallFailed(Exception):
    """Why an engine cannot be installed, in a few words."""


def environment(name: str) -> Path:
    return FOLDER / name / "venv"


def interpreter(name: str) -> str:
    return str(environment(name) / "bin" / "python")


def install(
    uv: Path,
    name: str,
    packages: Sequence[str],
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Create the environment and install the packages, unless the same ones are installed already.

    `overrides` are requirements that replace those of the packages; `variables` are for packages that compile.
    """
    folder = environment(name)
    mark = folder.parent / "installed.txt"
    wanted = "\n".join([*packages, *overrides])
    if mark.exists() and mark.read_text() == wanted:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "bin" / "python").exists():
        run([str(uv), "venv", "--quiet", "--python", sys.executable, str(folder)])
    flags = list(UV_FLAGS)
    if overrides:
        file = folder.parent / "overrides.txt"
        file.write_text("\n".join(overrides) + "\n")
        flags += ["--overrides", str(file)]
    argv = [str(uv), "pip", "install", "--quiet", *flags, "--python", interpreter(name), *packages]
    run(argv, {**os.environ, **variables})
    mark.write_text(wanted)


def run(argv: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command. Raise `InstallFailed` with the last line of stderr if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise InstallFailed(f"not installed after {TIMEOUT_S} s") from None
    except FileNotFoundError:
        raise InstallFailed(f"no `{argv[0]}`; `make bench-peers` brings it") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise InstallFailed(f"not installable: {lines[-1][:160]}")

"""Runs agents of the command line as `docs/how-to/use-other-agents.md` says, with this server, in an empty folder.

Shared code of the scripts in this folder, like `checks`.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from checks import HOWTOS, base_url

PAGE = HOWTOS / "use-other-agents.md"
DOCUMENTED_URL, DOCUMENTED_MODEL = "http://127.0.0.1:8080/v1", "my-model"
WRITTEN = "written by the agent"
LIMIT_S = 90


class Ran(NamedTuple):
    said: str
    """What the agent says to its user."""
    shown: str
    """Its other output."""
    written: str
    """The file that it wrote."""


def documented(agent: str, language: str, model: str) -> str:
    """Return an example of an agent's section, for this server and model."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = [each for each in section if each.startswith(f"{agent}\n")]
    match = re.search(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert match is not None, (agent, language)
    return match[1].replace(DOCUMENTED_URL, base_url()).replace(DOCUMENTED_MODEL, model)


def run(command: str, programs: Path, files: Mapping[str, str] | None = None, **variables: str) -> Ran:
    """Run a command of a shell that has the agent write `result.txt`.

    The agent gets no settings of this machine, and reaches nothing but it. `programs`: the folder of the agent's.
    `files`: texts by path; a path that begins with `~/` is in the home folder, others in the current one. `variables`:
    of its environment.
    """
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        for path, text in (files or {}).items():
            place = Path(home) / path[2:] if path.startswith("~/") else Path(folder) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        unreachable = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": home, "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            ["bash", "-ec", command],
            env={**environment, **unreachable, **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        written = Path(folder) / "result.txt"
        assert written.exists(), done.stdout + done.stderr
        return Ran(done.stdout, done.stderr, written.read_text())


def of_npm(pattern: str = ".bin") -> Path:
    """Return the folder of the programs of the script's npm package. `pattern`: of a package for this machine."""
    return min(Path(os.environ["PAGEMILL_NPM"]).glob(pattern), key=lambda folder: len(str(folder)))

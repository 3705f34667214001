# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@openai/codex@0.171.0"
# ///
"""Codex, OpenAI's agent for the command line, on /v1/responses."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from checks import HOWTOS, base_url, check, report_all

MODEL = "codex"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {"name": "exec_command", "arguments": {"cmd": "printf 'written by the agent' > result.txt"}},
    ],
    ["Is another agent there?", {"name": "multi_agent_v1__close_agent", "arguments": {"target": "another"}}],
    ["The file result.txt exists, as you asked."],
]
WRITTEN, SAID = "written by the agent", ANSWERS[2][0]
DOCUMENTED_URL, DOCUMENTED_MODEL = "http://127.0.0.1:8080/v1", "my-model"
FLAGS = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
LIMIT_S = 60


def documented(language: str) -> str:
    """Return an example of the how-to guide, for this server and model."""
    match = re.search(rf"^```{language}\n(.*?)^```", (HOWTOS / "use-codex.md").read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1].replace(DOCUMENTED_URL, base_url()).replace(DOCUMENTED_MODEL, MODEL)


def run(command: str) -> tuple[str, str, str]:
    """Run a command of a shell in an empty folder, with the guide's settings; return what the program says to the user,
    its other output, and the file that the agent wrote.

    The agent gets no settings of this machine, and reaches nothing but it.
    """
    (program,) = Path(os.environ["PAGEMILL_NPM"]).glob("@openai/codex-*/vendor/*/bin/codex")
    settings = documented("toml")
    assert base_url() in settings
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        (Path(home) / "config.toml").write_text(settings)
        unreachable = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
        environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": home, "CODEX_HOME": home}
        done = subprocess.run(
            ["bash", "-ec", command],
            env={**environment, **unreachable, "NO_PROXY": "127.0.0.1", "PAGEMILL_API_KEY": "none"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr, (Path(folder) / "result.txt").read_text()


@check("the example of the how-to guide: its tool exec_command writes a file, and it answers to the result")
def guide() -> None:
    said, _, written = run(documented("sh"))
    assert (said.strip(), written) == (SAID, WRITTEN)


@check("a tool of a namespace is called by both names")
def namespace() -> None:
    _, shown, _ = run(f"codex exec {FLAGS} 'Write result.txt'")
    assert "unsupported call" not in shown
    assert "invalid agent id" in shown


if __name__ == "__main__":
    report_all()

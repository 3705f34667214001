# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@openai/codex@0.171.0"
# ///
"""Codex, OpenAI's agent for the command line, on /v1/responses."""

from __future__ import annotations

import re
from typing import Any

from agent_programs import DOCUMENTED_MODEL, DOCUMENTED_URL, WRITTEN, Ran, of_npm, run
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
SAID = ANSWERS[2][0]
FLAGS = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"


def documented(language: str) -> str:
    """Return an example of the how-to guide, for this server and model."""
    match = re.search(rf"^```{language}\n(.*?)^```", (HOWTOS / "use-codex.md").read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1].replace(DOCUMENTED_URL, base_url()).replace(DOCUMENTED_MODEL, MODEL)


def ran(command: str, more_settings: str = "", **variables: str) -> Ran:
    """Run a command of a shell with the guide's settings, and more of the server's."""
    settings = documented("toml") + more_settings
    assert base_url() in settings
    programs = of_npm("@openai/codex-*/vendor/*/bin")
    return run(command, programs, {"~/.codex/config.toml": settings}, PAGEMILL_API_KEY="none", **variables)


@check("the example of the how-to guide: its tool exec_command writes a file, and it answers to the result")
def guide() -> None:
    said, _, written = ran(documented("sh"))
    assert (said.strip(), written) == (SAID, WRITTEN)


@check("a tool of a namespace is called by both names")
def namespace() -> None:
    _, shown, _ = ran(f"codex exec {FLAGS} 'Write result.txt'")
    assert "unsupported call" not in shown
    assert "invalid agent id" in shown


@check("its WebSocket mode: a prepared turn, a call, and an answer to its result, over one connection")
def websocket() -> None:
    said, shown, written = ran(documented("sh"), "supports_websockets = true\n", RUST_LOG="info")
    assert (said.strip(), written) == (SAID, WRITTEN)
    for warmup in ("true", "false"):
        assert f'transport="responses_websocket" turn.has_metadata_header=true websocket.warmup={warmup}' in shown
    assert 'transport="responses_http"' not in shown


if __name__ == "__main__":
    report_all()

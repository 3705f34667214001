# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@mariozechner/pi-coding-agent@0.73.1"
# ///
"""pi, an agent for the command line, on /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from agent_programs import WRITTEN, documented, of_npm, run
from checks import check, report_all

MODEL = "pi"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {"name": "bash", "arguments": {"command": "printf 'written by the agent' > result.txt"}},
    ],
    ["The file result.txt exists, as you asked."],
]


@check("the example of the how-to guide: its tool bash writes a file, and it answers to the result")
def guide() -> None:
    files = {"~/.pi/agent/models.json": documented("pi", "json", MODEL)}
    said, _, written = run(documented("pi", "sh", MODEL), of_npm(), files)
    assert ANSWERS[1][0] in said
    assert written == WRITTEN


if __name__ == "__main__":
    report_all()

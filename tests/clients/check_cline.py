# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "cline@3.0.65"
# ///
"""Cline, an agent for the command line, on /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from agent_programs import WRITTEN, documented, of_npm, run
from checks import check, report_all

MODEL = "cline"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {"name": "run_commands", "arguments": {"commands": ["printf 'written by the agent' > result.txt"]}},
    ],
    ["The file result.txt exists, as you asked."],
]


@check("the example of the how-to guide: its tool run_commands writes a file, and it answers to the result")
def guide() -> None:
    said, _, written = run(documented("Cline", "sh", MODEL), of_npm())
    assert ANSWERS[1][0] in said
    assert written == WRITTEN


if __name__ == "__main__":
    report_all()

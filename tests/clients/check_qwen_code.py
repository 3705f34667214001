# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@qwen-code/qwen-code@0.24.4"
# ///
"""Qwen Code, an agent for the command line, on /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from agent_programs import WRITTEN, documented, of_npm, run
from checks import check, report_all

MODEL = "qwen-code"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {
            "name": "run_shell_command",
            "arguments": {"command": "printf 'written by the agent' > result.txt", "is_background": False},
        },
    ],
    ["The file result.txt exists, as you asked."],
]


@check("the example of the how-to guide: its tool run_shell_command writes a file, and it answers to the result")
def guide() -> None:
    said, _, written = run(documented("Qwen Code", "sh", MODEL), of_npm())
    assert ANSWERS[1][0] in said
    assert written == WRITTEN


if __name__ == "__main__":
    report_all()

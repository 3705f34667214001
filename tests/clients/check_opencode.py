# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "opencode-ai@1.18.33"
# ///
"""opencode, an agent for the command line, on /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from agent_programs import WRITTEN, documented, of_npm, run
from checks import check, report_all

MODEL = "opencode"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {
            "name": "bash",
            "arguments": {"command": "printf 'written by the agent' > result.txt", "description": "Write"},
        },
    ],
    ["The file result.txt exists, as you asked."],
]


@check("the example of the how-to guide: its tool bash writes a file, and it answers to the result")
def guide() -> None:
    files = {"opencode.json": documented("opencode", "json", MODEL)}
    said, _, written = run(documented("opencode", "sh", MODEL), of_npm("opencode-linux-*/bin"), files)
    assert ANSWERS[1][0] in said
    assert written == WRITTEN


if __name__ == "__main__":
    report_all()

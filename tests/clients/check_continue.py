# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@continuedev/cli@1.5.47"
# ///
"""Continue's agent for the command line, on /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from agent_programs import WRITTEN, documented, of_npm, run
from checks import check, report_all

MODEL = "continue"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {"name": "Bash", "arguments": {"command": "printf 'written by the agent' > result.txt"}},
    ],
    ["The file result.txt exists, as you asked."],
]


@check("the example of the how-to guide: its tool Bash writes a file, and it answers to the result")
def guide() -> None:
    files = {"pagemill.yaml": documented("Continue", "yml", MODEL)}
    said, _, written = run(documented("Continue", "sh", MODEL), of_npm(), files)
    assert ANSWERS[1][0] in said
    assert written == WRITTEN


if __name__ == "__main__":
    report_all()

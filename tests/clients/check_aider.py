# /// script
# dependencies = ["aider-chat==0.86.2", "pydantic"]
# ///
"""aider, an agent for the command line that writes files in its answers, on /v1/chat/completions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agent_programs import WRITTEN, documented, run
from checks import check, report_all

MODEL = "aider"
ANSWERS: list[list[Any]] = [["I will write the file now.\n\nresult.txt\n```\nwritten by the agent\n```"]]


@check("the example of the how-to guide: it writes the file of an answer")
def guide() -> None:
    said, _, written = run(documented("aider", "sh", MODEL), Path(sys.executable).parent)
    assert "Applied edit to result.txt" in said
    assert written.strip() == WRITTEN


if __name__ == "__main__":
    report_all()

# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@anthropic-ai/claude-code@2.1.332"
# ///
"""Claude Code, Anthropic's agent for the command line, on /v1/messages."""

from __future__ import annotations

import json
import re
from typing import Any

from agent_programs import DOCUMENTED_MODEL, WRITTEN, of_npm, run
from checks import HOWTOS, base_url, check, report_all

MODEL = "claude-code"
ANSWERS: list[list[Any]] = [
    [
        "I will write the file now.",
        {
            "name": "Bash",
            "arguments": {"command": "printf 'written by the agent' > result.txt", "description": "Write the file"},
        },
    ],
    ["The file result.txt is there now, as you asked."],
]
SAID = ANSWERS[1][0]
PROGRAMS = "@anthropic-ai/claude-code-*"
DOCUMENTED_URL = "http://127.0.0.1:8080"


@check("the example of the how-to guide: its tool Bash writes a file, and it answers to the result")
def guide() -> None:
    match = re.search(r"^```sh\n(export.*?)^```", (HOWTOS / "use-claude-code.md").read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    url = base_url().removesuffix("/v1")
    example = match[1].replace(DOCUMENTED_URL, url).replace(DOCUMENTED_MODEL, MODEL)
    assert example != match[1]
    said, _, written = run(example, of_npm(PROGRAMS))
    assert (said.strip(), written) == (SAID, WRITTEN)


@check("its defaults: it asks for 32,000 tokens, and lowers them after the error about the context")
def defaults() -> None:
    variables = {"ANTHROPIC_BASE_URL": base_url().removesuffix("/v1"), "ANTHROPIC_AUTH_TOKEN": "none"}
    command = "claude -p 'Write result.txt' --allowedTools Bash --output-format json"
    said, _, written = run(command, of_npm(PROGRAMS), **variables, ANTHROPIC_MODEL=MODEL)
    result = json.loads(said)
    assert (result["is_error"], result["num_turns"], result["result"], written) == (False, 2, SAID, WRITTEN)
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * (usage["input_tokens"] + usage["cache_read_input_tokens"]) / 2


if __name__ == "__main__":
    report_all()

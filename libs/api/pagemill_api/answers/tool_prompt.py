"""Write tools and calls as plain messages in the format of a parser, for chat templates that render none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill_api.answers.call_syntax import CallSyntax

_NO_SYSTEM = "System role not supported"
"""The error that templates without system messages raise for one."""
_INTRODUCTION = """\
# Tools

You may call these functions, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON:
{example}"""
_EXAMPLE = [("NAME", {"KEY": "VALUE"})]


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: str, syntax: CallSyntax
) -> list[dict[str, Any]]:
    """Return `messages` with the tools described at their start, and with calls and results as text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        shown = _plain(message, syntax)
        if message["role"] == "tool" and plain and plain[-1].get("holds_results"):
            plain[-1]["content"] += "\n" + shown["content"]
        else:
            plain.append(shown)
    plain = [{key: value for key, value in each.items() if key != "holds_results"} for each in plain]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines, example=syntax.example(_EXAMPLE))
    return _introduced(plain, introduction, "user" if _NO_SYSTEM in template else "system")


def _plain(message: Mapping[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content, "holds_results": True}
    calls = [(each["function"]["name"], _arguments(each["function"])) for each in message.get("tool_calls", ())]
    content = "\n".join(part for part in (message["content"], syntax.example(calls) if calls else "") if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _arguments(function: Mapping[str, Any]) -> Any:
    try:
        return json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return function["arguments"]


def _introduced(messages: list[dict[str, Any]], introduction: str, role: str) -> list[dict[str, Any]]:
    """Return the messages with the introduction in a first message of `role`, which is added if it is missing."""
    first = messages[0]
    if first["role"] != role:
        return [{"role": role, "content": introduction}, *messages]
    content = f"{first['content']}\n\n{introduction}" if role == "system" else f"{introduction}\n\n{first['content']}"
    return [{**first, "content": content}, *messages[1:]]

"""The tools of a chat request and the calls in its history: checked plain objects, as templates take them.

`pagemill_api.answers` defines how models write calls, `chat_format` how tools get into the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pagemill_api.answers.cut_json import cut_object
from pagemill_api.openai.fields import MAX_NAME_CHARS, refusal
from pagemill_api.openai.unknown_fields import left_at
from pagemill_protocol import nesting
from pagemill_protocol.errors import show

MAX_TOOLS = 512
MAX_CALLS = 1024
NAME_PATTERN = "^[A-Za-z0-9_.-]{1,128}$"
_NAME = re.compile(NAME_PATTERN[:-1] + r"\Z")
_NAME_REMEDY = "Use 1 to 128 letters, digits, underscores, hyphens and dots."
_TOOL_KEYS = ("name", "description", "parameters", "strict")
_CHOICE_KEYS = ("type", "function")
_CALL_KEYS = ("id", "type", "function")
CHOICES = ("none", "auto", "required")


def _tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refusal("", f"`tools` must be a list of functions, got {show(value)}.")
    if len(value) > MAX_TOOLS:
        raise refusal("", f"`tools` has {len(value)} entries; at most {MAX_TOOLS} are allowed. Send fewer.")
    seen: set[str] = set()
    for index, tool in enumerate(value):
        function = _function(tool, f"[{index}]")
        left_in_tool(tool)
        _check_tool(function, f"[{index}].function")
        if function["name"] in seen:
            raise refusal(
                f"[{index}].function.name",
                f"Two tools have the name {show(function['name'])}. Give each a name of its own.",
            )
        seen.add(function["name"])
    return value


def left_in_tool(tool: Mapping[str, Any]) -> None:
    """Report the keys of a tool that are not read."""
    left_at("tools", tool, _CHOICE_KEYS)
    if isinstance(function := tool.get("function"), Mapping):
        left_at("tools.function", function, _TOOL_KEYS)


def _function(value: Any, field: str) -> dict[str, Any]:
    """Return the `function` of a tool or of a call."""
    if not isinstance(value, dict):
        raise refusal(field, f'`{field}` must be an object of type "function", got {show(value)}.')
    kind = value.get("type", "function")
    if kind != "function":
        raise refusal(
            f"{field}.type", f'The type {show(kind)} is not supported. Send "function".', "unsupported_parameter"
        )
    function = value.get("function")
    if not isinstance(function, dict):
        raise refusal(f"{field}.function", f"`function` must be an object with a `name`, got {show(function)}.")
    _check_name(function.get("name"), f"{field}.function.name")
    return function


def _check_name(name: Any, field: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise refusal(field, f"The name of a function is {show(name)}. {_NAME_REMEDY}")


def _check_tool(function: Mapping[str, Any], field: str) -> None:
    for key, kind, words in (
        ("description", str, "text"),
        ("parameters", dict, "a JSON schema (an object)"),
        ("strict", bool, "true or false"),
    ):
        given = function.get(key)
        if given is not None and not isinstance(given, kind):
            raise refusal(f"{field}.{key}", f"`{key}` must be {words}, got {show(given)}.")


def _tool_choice(value: Any) -> str | dict[str, Any]:
    if isinstance(value, str) and value in CHOICES:
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": _chosen(value, "", "tool_choice")}}
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        left_at("tool_choice", value, ("type", "allowed_tools"))
        return _allowed_tools(value.get("allowed_tools"))
    raise refusal(
        "",
        f'`tool_choice` is {show(value)}. Send "none", "auto", "required", '
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": {...}}.',
    )


def _chosen(value: Any, field: str, place: str) -> str:
    """Return the name in a choice of a function. `place`: its path without indices."""
    function = _function(value, field)
    left_at(place, value, _CHOICE_KEYS)
    left_at(f"{place}.function", function, ("name",))
    return str(function["name"])


def _allowed_tools(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("mode") not in ("auto", "required"):
        raise refusal("allowed_tools.mode", f'`allowed_tools` needs a `mode`, "auto" or "required", got {show(value)}.')
    tools = value.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise refusal("allowed_tools.tools", f"`tools` must be a list of 1 to {MAX_TOOLS} tools, got {show(tools)}.")
    left_at("tool_choice.allowed_tools", value, ("mode", "tools"))
    place = "tool_choice.allowed_tools.tools"
    names = [_chosen(tool, f"allowed_tools.tools[{index}]", place) for index, tool in enumerate(tools)]
    return {"type": "allowed_tools", "mode": value["mode"], "names": names}


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise refusal("", f"`tool_calls` must be a list of at most {MAX_CALLS} calls, got {show(value)}.")
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        function = _function(call, f"[{index}]")
        if not isinstance(call.get("id"), str) or not 0 < len(call["id"]) <= MAX_NAME_CHARS:
            raise refusal(f"[{index}].id", f"The id of a call must be text, got {show(call.get('id'))}.")
        arguments = call_arguments(function.get("arguments"), f"[{index}].function.arguments")
        left_at("messages.tool_calls", call, _CALL_KEYS)
        left_at("messages.tool_calls.function", function, ("name", "arguments"))
        kept = {name: call[name] for name in _CALL_KEYS if name in call}
        calls.append({**kept, "function": {"name": function["name"], "arguments": arguments}})
    return calls


def call_arguments(value: Any, field: str) -> str:
    """Return the arguments of an earlier call as the JSON text of one object, which chat templates take.

    No arguments, null and an empty list are no arguments; text that was encoded twice is decoded, and of a call that
    was cut its complete values are kept. Raises `PydanticCustomError` for anything else.
    """
    if value is None:
        return "{}"
    if not isinstance(value, str):
        raise refusal(field, f"`arguments` must be JSON as text, got {show(value)}. Encode them.")
    if nesting.text_exceeds(value):
        raise refusal(
            field,
            f"`arguments` are nested more than {nesting.MAX_LEVELS} levels deep. Use fewer levels.",
            nesting.CODE,
        )
    text: str = value
    found = _decoded(text)
    if isinstance(found, str):
        text, found = found, _decoded(found)
    if isinstance(found, dict):
        return text
    if found is None or found == []:
        return "{}"
    cut = cut_object(text) if found is _BROKEN else None
    if cut is None:
        raise refusal(field, f"`arguments` must be the JSON text of an object, got {show(value)}. Correct them.")
    return json.dumps(cut, ensure_ascii=False)


_BROKEN = object()


def _decoded(text: str) -> Any:
    """Return the JSON value; None for empty text, `_BROKEN` for text that is no JSON."""
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN


def choice_error(choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> PydanticCustomError | None:
    """Return the error of a `tool_choice` that does not match the tools, or None."""
    if choice in ("none", "auto"):
        return None
    if not tools:
        return refusal("tool_choice", f"`tool_choice` is {show(choice)} and there are no `tools`. Send some.")
    if isinstance(choice, str):
        return None
    allows = choice["type"] == "allowed_tools"
    names = choice["names"] if allows else [choice["function"]["name"]]
    absent = set(names) - {tool["function"]["name"] for tool in tools}
    if not absent:
        return None
    field = "tool_choice.allowed_tools.tools" if allows else "tool_choice.function.name"
    return refusal(field, f"`tool_choice` names {show(min(absent))}, which is not among `tools`. Add it there.")


_FUNCTION_NAME = {"type": "string", "pattern": NAME_PATTERN}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": _FUNCTION_NAME,
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_CHOSEN = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _FUNCTION_NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _CHOSEN, "minItems": 1, "maxItems": MAX_TOOLS},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _FUNCTION_NAME, "arguments": {"type": ["string", "null"]}},
            "required": ["name"],
        },
    },
    "required": ["id", "function"],
}
Tools = Annotated[
    list[dict[str, Any]],
    PlainValidator(_tools),
    WithJsonSchema({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}),
]
ToolChoice = Annotated[
    str | dict[str, Any],
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": list(CHOICES)}, _CHOSEN, _ALLOWED]}),
]
ToolCalls = Annotated[
    list[dict[str, Any]],
    PlainValidator(_tool_calls),
    WithJsonSchema({"type": "array", "items": _CALL, "maxItems": MAX_CALLS}),
]

"""The items of a request's `input`, as messages of a chat.

Calls of all kinds are calls of the assistant, their outputs messages of role tool; reasoning belongs to the assistant's
message after it. `ItemMessages` also knows which item each message came from, for errors at the client's own fields,
and which items and parts have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic_core import PydanticCustomError

from pagemill_api.dialects.openai_responses.opaque import opened
from pagemill_api.dialects.openai_responses.tools import INPUT, LOCAL_SHELL, TOOL_SEARCH, flat_name
from pagemill_api.openai.fields import MAX_CONTENT_PARTS, MAX_TEXT_CHARS, refusal, string_of
from pagemill_api.openai.schemas import MAX_MESSAGES
from pagemill_api.openai.tools import call_arguments
from pagemill_api.openai.unknown_fields import left_at
from pagemill_protocol import nesting
from pagemill_protocol.errors import show

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
ROLES = ("user", "assistant", "system", "developer")
COMPACTIONS = ("compaction", "compaction_summary")
SUMMARY = "Summary of the conversation so far:\n"
OMITTED_PART = "[An attachment was here. This model reads text only.]"
"""What the model reads in place of an image or a file in a tool's output, which the user cannot remove."""
_HOSTED_CALLS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
    *("mcp_call", "mcp_approval_request", "mcp_approval_response"),
)
"""Calls that OpenAI made itself; an item has no result that the model could read."""
_READ = frozenset(
    {
        *("type", "id", "status", "phase", "role", "content", "summary", "encrypted_content", "call_id", "name"),
        *("namespace", "arguments", "input", "output", "action", "tools", "execution", "environment", "operation"),
    }
)
"""Fields of items that are read, and those that an item of an answer has and that add nothing to a conversation."""
_PART_READ = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
_TEXT_INPUT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_STRING = {"type": "string"}


def _shape(kind: Any, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object of this type with these required properties, and any others."""
    given = {"type": kind, **properties}
    return {"type": "object", "properties": given, "required": list(given)}


_TEXT_PART = _shape({"enum": [each for each in TEXT_PARTS if each != "refusal"]}, text=_TEXT_INPUT)
_PARTS = [_TEXT_PART, _shape({"const": "refusal"}, refusal=_TEXT_INPUT)]
_OMITTED_PARTS = [_shape({"enum": ["input_image", "input_file"]})]
_ID = {"type": "string", "minLength": 1}


def _content(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"anyOf": [_TEXT_INPUT, {"type": "array", "items": {"anyOf": parts}, "maxItems": MAX_CONTENT_PARTS}]}


_MESSAGE = {
    "type": "object",
    "properties": {"type": {"const": "message"}, "role": {"enum": list(ROLES)}, "content": _content(_PARTS)},
    "required": ["role", "content"],
}
_OUTPUT = _content([*_PARTS, *_OMITTED_PARTS])
_ITEMS = [
    _MESSAGE,
    _shape({"const": "function_call"}, call_id=_ID, name=_STRING, arguments=_STRING),
    _shape({"enum": ["function_call_output", "custom_tool_call_output"]}, call_id=_ID, output=_OUTPUT),
    _shape({"const": "custom_tool_call"}, call_id=_ID, name=_STRING, input=_STRING),
    _shape({"const": "local_shell_call"}, action={"type": "object", "required": ["command"]}),
    _shape({"const": "local_shell_call_output"}, output=_OUTPUT),
    _shape({"const": "tool_search_call"}, call_id=_ID, arguments={"type": "object"}),
    _shape({"const": "tool_search_output"}, call_id=_ID, tools={"type": "array"}),
    _shape({"enum": list(COMPACTIONS)}, encrypted_content=_STRING),
    _shape({"enum": ["reasoning", *_HOSTED_CALLS]}),
]
INPUT_SCHEMA = {
    "anyOf": [
        _TEXT_INPUT,
        {"type": "array", "items": {"anyOf": _ITEMS}, "minItems": 1, "maxItems": MAX_MESSAGES},
    ]
}
"""What `input` takes, for the OpenAPI document."""


def input_items(value: Any) -> list[Item]:
    """Return `input` as a list of items. Raises `PydanticCustomError`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise refusal("", f"`input` must be a string or a list of items, got {show(value)}.")
    if not 0 < len(value) <= MAX_MESSAGES:
        raise refusal("", f"`input` has {len(value)} items; 1 to {MAX_MESSAGES} are allowed.")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise refusal(f"[{index}]", f"An item must be an object, got {show(item)}.")
    return value


class ItemMessages:
    """The messages of a list of items."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        """The path of the item that began each message."""
        self.unread: list[str] = []
        """Paths of items and parts without effect."""
        self.found_tools: list[tuple[str, Any]] = []
        """Tools that the client's own search returned, with the paths of their lists."""
        self._reasoning: list[str] = []
        """Reasoning before the next message of the assistant."""

    def add(self, item: Item, field: str) -> None:
        """Add an item. Raises `PydanticCustomError` for refused content."""
        left_at("input", item, _READ)
        kind = item.get("type", "message")
        if kind == "reasoning":
            self._reasoning += self._thoughts(item, field)
            return
        if kind in _HOSTED_CALLS:
            self.unread.append(field)
            return
        if kind in _CALLS:
            name, arguments = _CALLS[kind](item, field)
            self._call(item, field, name, arguments)
        elif kind in _OUTPUTS:
            self._output(item, field, kind)
        elif kind in COMPACTIONS:
            self._append({"role": "developer", "content": SUMMARY + _summary(item, field)}, field)
        elif kind == "message":
            self._message(item, field)
        else:
            raise _unsupported_item(kind, field)
        if self._reasoning and self.messages[-1]["role"] == "assistant":
            self.messages[-1]["reasoning_content"] = "\n".join(self._reasoning)
        self._reasoning = []

    def _append(self, message: dict[str, Any], field: str) -> None:
        self.messages.append(message)
        self.places.append(field)

    def _message(self, item: Item, field: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise refusal(f"{field}.role", f"`role` must be one of {', '.join(ROLES)}, got {show(role)}.")
        self._append({"role": role, "content": _texts(item.get("content"), f"{field}.content")}, field)

    def _call(self, item: Item, field: str, name: str, arguments: str) -> None:
        """Add a call to the previous message of the assistant, or to a new one: in this API calls are separate
        items."""
        call = {"id": _call_id(item, field), "type": "function", "function": {"name": name, "arguments": arguments}}
        if self._reasoning or not self.messages or self.messages[-1]["role"] != "assistant":
            self._append({"role": "assistant", "content": ""}, field)
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _output(self, item: Item, field: str, kind: str) -> None:
        if kind == "tool_search_output":
            tools = item.get("tools")
            if not isinstance(tools, list):
                raise refusal(f"{field}.tools", f"`tools` must be a list of tools, got {show(tools)}.")
            self.found_tools.append((f"{field}.tools", tools))
            text = orjson.dumps(tools).decode()
        else:
            text = _texts(item.get("output"), f"{field}.output", self.unread)
        self._append({"role": "tool", "tool_call_id": _call_id(item, field), "content": text}, field)

    def _thoughts(self, item: Item, field: str) -> list[str]:
        content = item.get("content") or []
        if not isinstance(content, list) or len(content) > MAX_CONTENT_PARTS:
            raise refusal(f"{field}.content", f"Reasoning must be a list of parts, got {show(content)}.")
        if content:
            return [_text(part, f"{field}.content[{index}]") for index, part in enumerate(content)]
        sealed = item.get("encrypted_content")
        text = opened(sealed) if isinstance(sealed, str) else None
        if text is None:
            self.unread.append(field)
        return [text] if text else []


def _function_call(item: Item, field: str) -> tuple[str, str]:
    arguments = call_arguments(item.get("arguments"), f"{field}.arguments")
    return _flat(item, field), arguments


def _custom_call(item: Item, field: str) -> tuple[str, str]:
    return _flat(item, field), orjson.dumps({INPUT: string_of(item, "input", field)}).decode()


def _shell_call(item: Item, field: str) -> tuple[str, str]:
    action = item.get("action")
    if not isinstance(action, dict) or not isinstance(action.get("command"), list):
        raise refusal(f"{field}.action", f"`action` must be an object with a `command`, got {show(action)}.")
    return LOCAL_SHELL, _object_text({key: value for key, value in action.items() if key != "type"}, f"{field}.action")


def _search_call(item: Item, field: str) -> tuple[str, str]:
    arguments = item.get("arguments")
    if not isinstance(arguments, dict):
        raise refusal(f"{field}.arguments", f"`arguments` must be an object, got {show(arguments)}.")
    return TOOL_SEARCH, _object_text(arguments, f"{field}.arguments")


_CALLS: Mapping[str, Callable[[Item, str], tuple[str, str]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
    "tool_search_call": _search_call,
}
"""Calls by the type of their items; each returns the name of the function and its arguments."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")


def _flat(item: Item, field: str) -> str:
    namespace = "" if item.get("namespace") is None else string_of(item, "namespace", field)
    return flat_name(string_of(item, "name", field), namespace)


def _object_text(value: dict[str, Any], field: str) -> str:
    if nesting.exceeds(value):
        raise refusal(field, f"It is nested more than {nesting.MAX_LEVELS} levels deep. Use fewer.", nesting.CODE)
    return orjson.dumps(value).decode()


def _call_id(item: Item, field: str) -> str:
    """Return the id of a call. An item of the local shell may have it as `id`."""
    kind = item.get("type", "")
    if item.get("call_id") is None and kind.startswith(LOCAL_SHELL) and item.get("id") is not None:
        return string_of(item, "id", field)
    value = item.get("call_id")
    if not isinstance(value, str) or not value:
        raise refusal(
            f"{field}.call_id",
            f"`call_id` must be the id of a call, got {show(value)}. Send that of the call and of its output.",
            "missing_required_parameter" if value is None else "invalid_value",
        )
    return value


def _summary(item: Item, field: str) -> str:
    sealed = item.get("encrypted_content")
    text = opened(sealed) if isinstance(sealed, str) else None
    if text is None:
        raise refusal(
            f"{field}.encrypted_content",
            "This compaction was not made by this server, which cannot read it. Send the conversation itself, or "
            "compact it with POST /v1/responses/compact.",
        )
    return text


def _texts(value: Any, field: str, omitted: list[str] | None = None) -> str:
    """Return content as text. `omitted`: gets the paths of parts that are not text; without it they are refused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_CONTENT_PARTS:
        raise refusal(
            field, f"Content must be a string or a list of at most {MAX_CONTENT_PARTS} parts, got {show(value)}."
        )
    texts: list[str] = []
    for index, part in enumerate(value):
        place = f"{field}[{index}]"
        if omitted is not None and isinstance(part, dict) and part.get("type") in ("input_image", "input_file"):
            omitted.append(place)
            texts.append(OMITTED_PART)
        else:
            texts.append(_text(part, place))
    return "\n".join(texts)


def _text(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise refusal(
            f"{field}.type",
            f'Content parts of type {show(kind)} are not supported. Send parts of type "input_text".',
            "unsupported_parameter",
        )
    left_at("input.content", part, _PART_READ)
    return string_of(part, "refusal" if kind == "refusal" else "text", field)


def _unsupported_item(kind: Any, field: str) -> PydanticCustomError:
    return refusal(
        f"{field}.type",
        f"Items of type {show(kind)} are not supported. Send messages, calls and their outputs.",
        "unsupported_parameter",
    )

"""Translates Anthropic's messages to those of a chat, and remembers where each of them comes from, for errors.

The result of a tool is a message of role tool, the use of one a call of the assistant; results come first, since they
answer the message before. A system message stays at its place: moving it to the beginning would change the prefix of
the prompt, which is cached. Tools whose loading is deferred are described where the conversation names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, WithJsonSchema, model_validator

from pagemill_api.dialects.anthropic.blocks import (
    CONTENT_SCHEMA,
    Block,
    ToolResults,
    blocks_of,
    text_of,
    unsupported_block,
)
from pagemill_api.openai.fields import RequestModel, refusal, string_of
from pagemill_api.openai.schemas import Effort
from pagemill_api.openai.unknown_fields import left_at
from pagemill_api.openai.unsupported import CACHED
from pagemill_protocol.errors import show

Message = dict[str, Any]
_PLACE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?")


def _content(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    return [dict(block) for block, _ in blocks_of(value, "")]


_OF_ASSISTANT = ("type", "text", "thinking", "id", "name", "input", "signature", "data", "citations", "caller")
"""Fields of blocks of the assistant that are read, and those that a block of an answer has and that add nothing."""


class MessageOutput(RequestModel):
    effort: Effort | None = None


class InputMessage(RequestModel):
    IGNORED: ClassVar = {
        "content[].cache_control": CACHED,
        "content[].citations": "answers cite nothing; documents and search results are text",
        "content[].is_error": "chat templates cannot mark it; the model reads the result's text",
        "content[].signature": "signatures are empty here",
    }

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[dict[str, Any]], PlainValidator(_content), WithJsonSchema(CONTENT_SCHEMA)] = ""
    clear_at: Literal["next_user_message", "never"] = "never"
    """Of a system message: whether the model reads it only until the next user message."""
    output_config: MessageOutput | None = None
    """Of a system message: settings of the turn that it belongs to. Such a message needs no content."""

    @model_validator(mode="after")
    def _needs_content(self) -> InputMessage:
        if "content" not in self.model_fields_set and (self.role != "system" or self.output_config is None):
            raise refusal("content", "`content` is missing. Send a string or a list of content blocks.")
        return self


class ChatMessages:
    """The messages of a chat, as far as they are translated."""

    def __init__(self, system: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools`: the functions of the request by name."""
        self.messages: list[Message] = []
        self._places: list[tuple[str, list[str]]] = []
        """Of each message: the client's path of it, and those of its calls."""
        self._tools = tools
        self._results = ToolResults(self._described)
        self.effort: str | None = None
        """The effort that system messages set for the current turn."""
        if system:
            self._add({"role": "system", "content": system}, "system")

    @property
    def unread(self) -> list[str]:
        """The client's paths of blocks that the model cannot read."""
        return self._results.unread

    def client_path(self, text: str) -> str:
        """Return a text with the client's paths in place of those of the chat."""
        return _PLACE.sub(self._client_path, text)

    def _client_path(self, match: re.Match[str]) -> str:
        index, call = int(match[1]), match[2]
        if index >= len(self._places):
            return match[0]
        path, calls = self._places[index]
        return path if call is None or int(call) >= len(calls) else calls[int(call)]

    def add(self, message: InputMessage, index: int, *, is_passed: bool) -> None:
        """Add the client's message number `index`; `is_passed`: whether a message of the user follows."""
        place = f"messages[{index}]"
        if message.role == "system":
            self._add_system(message, place, is_passed=is_passed)
        elif isinstance(message.content, str):
            self._add({"role": message.role, "content": message.content}, place)
            self._begin_turn(message.role)
        elif message.role == "assistant":
            self._add_assistant(message.content, place)
        else:
            self._add_user(message.content, place)

    def _add(self, message: Message, place: str, calls: Sequence[str] = ()) -> None:
        self.messages.append(message)
        self._places.append((place, [*calls]))

    def _begin_turn(self, role: str) -> None:
        if role == "user":
            self.effort = None

    def _add_system(self, message: InputMessage, place: str, *, is_passed: bool) -> None:
        if message.output_config is not None and message.output_config.effort is not None:
            self.effort = message.output_config.effort
        if message.clear_at == "next_user_message" and is_passed:
            return
        text = message.content
        if not isinstance(text, str):
            text = "\n".join(self._system_text(block, where) for block, where in blocks_of(text, f"{place}.content"))
        if text:
            self._add({"role": "system", "content": text}, place)

    def _system_text(self, block: Block, where: str) -> str:
        kind = block.get("type")
        if kind not in ("tool_addition", "tool_removal"):
            return text_of(block, where)
        tool = block.get("tool")
        tool, place = (tool if isinstance(tool, dict) else {}), f"{where}.tool"
        if tool.get("type") != "tool_reference":
            raise refusal(
                f"{place}.type",
                f"The tool must be a `tool_reference` to one of `tools`, got {show(tool.get('type'))}. Define it "
                "there.",
                "unsupported_parameter",
            )
        name = string_of(tool, "name", place)
        if kind == "tool_removal":
            return f"The tool {json.dumps(name)} is no longer available."
        return self._described(name, f"{place}.name")

    def _described(self, name: str, field: str) -> str:
        """Return the text that makes a tool known to the model."""
        tool = self._tools.get(name)
        if tool is None:
            raise refusal(field, f"The tool {show(name)} is not among `tools`. Add it there.")
        return f"This tool is available: {json.dumps(tool, ensure_ascii=False)}"

    def _add_user(self, content: list[dict[str, Any]], place: str) -> None:
        texts: list[str] = []
        has_results = False
        for block, where in blocks_of(content, f"{place}.content"):
            if block.get("type") == "tool_result":
                left_at("messages.content", block, ("type", "tool_use_id", "content"))
                call_id = string_of(block, "tool_use_id", where)
                result = self._results.text(block.get("content") or "", f"{where}.content")
                self._add({"role": "tool", "tool_call_id": call_id, "content": result}, where)
                has_results = True
            else:
                texts.append(text_of(block, where))
        if texts or not has_results:
            self._add({"role": "user", "content": "\n".join(texts)}, place)
        if not has_results:
            self._begin_turn("user")

    def _add_assistant(self, content: list[dict[str, Any]], place: str) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        places: list[str] = []
        for block, where in blocks_of(content, f"{place}.content"):
            left_at("messages.content", block, _OF_ASSISTANT)
            match block.get("type"):
                case "thinking":
                    reasoning.append(string_of(block, "thinking", where))
                case "redacted_thinking":
                    continue
                case "tool_use":
                    calls.append(_call(block, where))
                    places.append(where)
                case "text":
                    texts.append(string_of(block, "text", where))
                case _:
                    raise unsupported_block(block, where)
        message: Message = {"role": "assistant", "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = "\n".join(reasoning)
        self._add(message, place, places)


def _call(block: Block, where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise refusal(f"{where}.input", f"`input` of a tool use must be an object, got {show(arguments)}.")
    function = {"name": string_of(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": string_of(block, "id", where), "type": "function", "function": function}

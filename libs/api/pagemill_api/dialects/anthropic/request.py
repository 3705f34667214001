"""Body of `POST /v1/messages`, and its translation to a chat request.

Blocks become OpenAI's messages: a tool result is a message of role tool, a tool use a call of the assistant. Content
other than text is refused by its place. Shape and names: Anthropic's Messages API, version 2023-06-01.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pagemill_api.dialects.translation import SamplingExtensions
from pagemill_api.openai.fields import (
    MAX_CONTENT_PARTS,
    MAX_TEXT_CHARS,
    Name,
    RequestModel,
    Text,
    refusal,
    shorten,
)
from pagemill_api.openai.schemas import MAX_MESSAGES, Effort
from pagemill_api.openai.tools import MAX_TOOLS, NAME_PATTERN
from pagemill_api.openai.unsupported import CACHED, NO_USERS, ONE_TIER, Unsupported
from pagemill_protocol.request.sampling import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

Message = dict[str, Any]
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
_REMOVE = "Remove it."


def _texts(value: Any, field: str = "") -> str:
    """Return a string as it is, or the joined text of a list of text blocks."""
    if isinstance(value, str):
        return value
    return "\n".join(_text(block, where) for block, where in _blocks(value, field))


def _blocks(value: Any, field: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield content blocks, each with its place in the body."""
    if not isinstance(value, list):
        raise refusal(field, f"Content must be a string or a list of blocks, got {shorten(value)}.")
    if len(value) > MAX_CONTENT_PARTS:
        raise refusal(field, f"There are {len(value)} content blocks; at most {MAX_CONTENT_PARTS} are allowed.")
    for index, block in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(block, dict):
            raise refusal(where, f'A content block must be an object such as {{"type": "text"}}, got {shorten(block)}.')
        yield block, where


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise _unsupported_block(block, where)
    return _field(block, "text", where)


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise refusal(f"{where}.{name}", f"`{name}` of the block must be a string, got {shorten(value)}.")
    return value


def _unsupported_block(block: Mapping[str, Any], where: str) -> PydanticCustomError:
    return refusal(
        f"{where}.type",
        f'Content blocks of type {shorten(block.get("type"))} are not supported here. Send blocks of type "text".',
        "unsupported_parameter",
    )


def _content(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    return [dict(block) for block, _ in _blocks(value, "")]


def _block(kind: str, **properties: Any) -> dict[str, Any]:
    given = {"type": {"const": kind}, **properties}
    return {"type": "object", "properties": given, "required": list(given)}


_STRING = {"type": "string"}
_TEXTS = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_TEXT_CHARS},
        {"type": "array", "items": _block("text", text=_STRING), "maxItems": MAX_CONTENT_PARTS},
    ]
}
_CONTENT = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_TEXT_CHARS},
        {
            "type": "array",
            "maxItems": MAX_CONTENT_PARTS,
            "items": {
                "anyOf": [
                    _block("text", text=_STRING),
                    _block("thinking", thinking=_STRING),
                    _block("tool_use", id=_STRING, name=_STRING, input={"type": "object"}),
                    _block("tool_result", tool_use_id=_STRING, content=_TEXTS),
                ]
            },
        },
    ]
}


class InputMessage(RequestModel):
    IGNORED: ClassVar = {
        "content[].cache_control": CACHED,
        "content[].citations": "documents, which are cited, are refused",
        "content[].is_error": "chat templates cannot mark it; the model reads the result's text",
        "content[].signature": "signatures are empty here",
    }

    role: Literal["user", "assistant"]
    content: Annotated[str | list[dict[str, Any]], PlainValidator(_content), WithJsonSchema(_CONTENT)]

    def for_chat(self, field: str) -> list[Message]:
        """Return the message as OpenAI's messages, tool results first, since they answer the previous message."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        return self._from_assistant(field) if self.role == "assistant" else self._from_user(field)

    def _from_user(self, field: str) -> list[Message]:
        results: list[Message] = []
        texts: list[str] = []
        for block, where in _blocks(self.content, field):
            if block.get("type") == "tool_result":
                found = {"role": "tool", "tool_call_id": _field(block, "tool_use_id", where)}
                results.append({**found, "content": _texts(block.get("content", ""), f"{where}.content")})
            else:
                texts.append(_text(block, where))
        return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])

    def _from_assistant(self, field: str) -> list[Message]:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, where in _blocks(self.content, field):
            match block.get("type"):
                case "thinking":
                    reasoning.append(_field(block, "thinking", where))
                case "redacted_thinking":
                    continue
                case "tool_use":
                    calls.append(_call(block, where))
                case _:
                    texts.append(_text(block, where))
        message: Message = {"role": "assistant", "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = "\n".join(reasoning)
        return [message]


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise refusal(f"{where}.input", f"`input` of a tool use must be an object, got {shorten(arguments)}.")
    function = {"name": _field(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _field(block, "id", where), "type": "function", "function": function}


class Tool(RequestModel):
    UNSUPPORTED: ClassVar = {
        "allowed_callers": Unsupported("Tools are called by the model directly; remove it.", (["direct"], [])),
        "input_examples": Unsupported("Write the examples into the tool's `description`.", ([],)),
    }
    IGNORED: ClassVar = {
        "cache_control": CACHED,
        "defer_loading": "all tools are in the prompt",
        "eager_input_streaming": "arguments are always streamed as they are generated",
    }

    name: Annotated[Name, WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False
    type: str = "custom"

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        given = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": given | ({"strict": True} if self.strict else {})}


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(RequestModel):
    IGNORED: ClassVar = {"user_id": NO_USERS}

    user_id: Annotated[str, Field(max_length=1024)] | None = None


class MessagesRequest(SamplingExtensions):
    UNSUPPORTED: ClassVar = {
        "container": Unsupported("This server runs no code. " + _REMOVE),
        "mcp_servers": Unsupported("This server connects to no MCP servers; call them from the client.", ([],)),
        "context_management": Unsupported("Shorten the messages before sending them."),
        "compaction": Unsupported("Shorten the messages before sending them."),
        "fallbacks": Unsupported("Send the request to the other model yourself.", ([],)),
        "output_format": Unsupported("Send `output_config.format`."),
        "thread": Unsupported("Nothing is stored; send the whole conversation as `messages`."),
    }
    IGNORED: ClassVar = {
        "cache_control": CACHED,
        "inference_geo": "answers are computed where the model is deployed",
        "service_tier": ONE_TIER,
        "speed": "there is one speed; `priority` orders requests",
        "system[].cache_control": CACHED,
        "system[].citations": "documents, which are cited, are refused",
        "user_profile_id": NO_USERS,
        "workspace_id": NO_USERS,
    }

    model: Name
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int
    system: Annotated[str, PlainValidator(_texts), WithJsonSchema(_TEXTS)] = ""
    stop_sequences: list[StopSequence] = Field([], max_length=MAX_STOP_STRINGS)
    stream: bool = False
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: int | None = None
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the body of the equivalent chat completion. Raises `PydanticCustomError` for refused content."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for index, message in enumerate(self.messages):
            messages += message.for_chat(f"messages[{index}].content")
        prefilled = self.messages[-1].role == "assistant"
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tools": [self._tool(index) for index in range(len(self.tools))],
            "user": self.metadata.user_id if self.metadata is not None else None,
            "continue_final_message": prefilled or None,
            "add_generation_prompt": False if prefilled else None,
            **self.extensions,
            **self._choice(),
            **self._reasoning(),
            **self._output(),
        }
        return {name: value for name, value in body.items() if value is not None}

    def _tool(self, index: int) -> dict[str, Any]:
        tool = self.tools[index]
        if tool.type != "custom":
            raise refusal(
                f"tools[{index}].type",
                f'Tools of type {shorten(tool.type)} run at Anthropic, not here. Send tools of type "custom".',
                "unsupported_parameter",
            )
        return tool.for_chat()

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        if self.tool_choice.type == "tool" and self.tool_choice.name is None:
            raise refusal("tool_choice.name", "`tool_choice` of type tool needs the `name` of a tool. Send it.")
        return {
            "tool_choice": self.tool_choice.for_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
        }

    def _reasoning(self) -> dict[str, Any]:
        if self.thinking is None:
            return {}
        thinks = self.thinking.type != "disabled"
        return {
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
            "include_reasoning": self.thinking.display != "omitted",
            "thinking_token_budget": self.thinking.budget_tokens,
        }

    def _output(self) -> dict[str, Any]:
        if self.output_config is None:
            return {}
        given: dict[str, Any] = {"reasoning_effort": self.output_config.effort}
        if self.output_config.format is not None:
            form = {"name": "output", "schema": self.output_config.format.schema_, "strict": True}
            given["response_format"] = {"type": "json_schema", "json_schema": form}
        return given


class CountRequest(MessagesRequest):
    """Body of `POST /v1/messages/count_tokens`, which needs no limit of the answer."""

    IGNORED: ClassVar = {
        **MessagesRequest.IGNORED,
        **dict.fromkeys(
            (
                *("max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"),
                *("output_config.format.schema", "output_config.format.type", "thinking.budget_tokens"),
                *("thinking.display", "tool_choice.disable_parallel_tool_use"),
                *SamplingExtensions.model_fields,
            ),
            "no answer is generated",
        ),
    }

    max_tokens: int = 1

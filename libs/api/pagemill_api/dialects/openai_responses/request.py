"""Body of `POST /v1/responses`, and its translation to a chat request.

Items become messages: a function call is a call of the assistant, its output a message of role tool; reasoning belongs
to the assistant's message after it. Where a gateway stores responses, the items of the previous response come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, FiniteFloat, PlainValidator, WithJsonSchema
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
from pagemill_api.openai.tools import MAX_TOOLS, call_arguments
from pagemill_api.openai.unsupported import IGNORED_IN_RESPONSES, NO_MODERATION, Unsupported

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
ROLES = ("user", "assistant", "system", "developer")


def _input(value: Any) -> list[Item]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise refusal("", f"`input` must be a string or a list of items, got {shorten(value)}.")
    if not 0 < len(value) <= MAX_MESSAGES:
        raise refusal("", f"`input` has {len(value)} items; 1 to {MAX_MESSAGES} are allowed.")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise refusal(f"[{index}]", f"An item must be an object, got {shorten(item)}.")
    return value


def _texts(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_CONTENT_PARTS:
        raise refusal(
            field, f"Content must be a string or a list of at most {MAX_CONTENT_PARTS} parts, got {shorten(value)}."
        )
    return "\n".join(_text(part, f"{field}[{index}]") for index, part in enumerate(value))


def _text(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise refusal(
            f"{field}.type",
            f'Content parts of type {shorten(kind)} are not supported. Send parts of type "input_text".',
            "unsupported_parameter",
        )
    return _string(part, "refusal" if kind == "refusal" else "text", field)


def _string(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refusal(f"{field}.{name}", f"`{name}` must be a string, got {shorten(value)}.")
    return value


_TEXT_INPUT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": list(ROLES)}, "content": _TEXT_INPUT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
_INPUT = {"anyOf": [_TEXT_INPUT, {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}]}


class FunctionTool(RequestModel):
    type: str
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = False


class TextConfig(RequestModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(RequestModel):
    IGNORED: ClassVar = {"summary": "reasoning is shown as a whole"}

    effort: Effort | None = None
    summary: str | None = None


def _check_include(parts: list[str]) -> list[str]:
    if "message.output_text.logprobs" in parts:
        message = (
            "`include` with message.output_text.logprobs is not supported. Chat completions have log probabilities."
        )
        raise refusal("", message, "unsupported_parameter")
    return parts


class ResponsesRequest(SamplingExtensions):
    UNSUPPORTED: ClassVar = {
        "conversation": Unsupported("Send `previous_response_id`, or the whole conversation as `input`."),
        "background": Unsupported(
            "Wait for the answer, or stream it; for large amounts of low-priority work use batches.", (False,)
        ),
        "prompt": Unsupported("Prompt templates are stored at OpenAI; send `instructions` and `input`."),
        "truncation": Unsupported("Shorten the input before sending it.", ("disabled",)),
        "top_logprobs": Unsupported("Chat completions have log probabilities.", (0,)),
        "moderation": Unsupported(NO_MODERATION),
        "context_management": Unsupported("Shorten the input before sending it.", ([],)),
    }
    IGNORED: ClassVar = IGNORED_IN_RESPONSES

    model: Name
    input: Annotated[list[Item], PlainValidator(_input), WithJsonSchema(_INPUT)]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    stream: bool = False
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    store: bool = True
    previous_response_id: Name | None = None
    include: Annotated[list[str], AfterValidator(_check_include)] = Field([], max_length=16)
    """Parts to add to a response. Those of tools that run at OpenAI and of encrypted reasoning do not exist here."""
    max_tool_calls: int | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    def for_chat(self, before: Sequence[Item] = ()) -> dict[str, Any]:
        """Return the body of the equivalent chat completion, after the items `before`.

        Raises `PydanticCustomError` for refused content.
        """
        messages = [{"role": "developer", "content": self.instructions}] if self.instructions else []
        body = {
            "model": self.model,
            "messages": messages + _messages([*before, *self.input], num_before=len(before)),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)],
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "user": self.user,
            **self.extensions,
            **self._text(),
        }
        return {name: value for name, value in body.items() if value is not None}

    def shown(self, *, stored: bool = False) -> dict[str, Any]:
        """Return the fields of the request that a response repeats."""
        given = self.model_dump(
            by_alias=True, mode="json", exclude={"input", "model", "stream", "include", *self.extensions}
        )
        text = given["text"] or {}
        given["text"] = {**text, "format": text.get("format") or {"type": "text"}}
        given["metadata"] = given["metadata"] or {}
        given["store"] = stored
        return given

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            tools = [_named(tool) for tool in choice["tools"]]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        return choice

    def _text(self) -> dict[str, Any]:
        if self.text is None:
            return {}
        given: dict[str, Any] = {"verbosity": self.text.verbosity}
        form = self.text.format
        if form is not None and form.type == "json_schema":
            named = {"name": form.name or "output", "schema": form.schema_, "strict": form.strict}
            given["response_format"] = {"type": "json_schema", "json_schema": named}
        elif form is not None:
            given["response_format"] = {"type": form.type}
        return given


def _named(tool: Any) -> Any:
    """Return a function's name in the shape of chat completions."""
    return {"type": "function", "function": {"name": tool.get("name")}} if isinstance(tool, dict) else tool


def _tool(tool: FunctionTool, field: str) -> dict[str, Any]:
    if tool.type != "function":
        raise refusal(
            f"{field}.type",
            f'Tools of type {shorten(tool.type)} run at OpenAI, not here. Send tools of type "function".',
            "unsupported_parameter",
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given | ({"strict": True} if tool.strict else {})}


def _messages(items: list[Item], *, num_before: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for index, item in enumerate(items, -num_before):
        field = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, field))
            case "function_call":
                _add_call(messages, item, field, joins=not reasoning)
            case "function_call_output":
                output = _texts(item.get("output"), f"{field}.output")
                call_id = _string(item, "call_id", field)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                reasoning += [_text(part, field) for part in _reasoning_parts(item)]
                continue
            case other:
                raise _unsupported_item(other, field)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "\n".join(reasoning)
        reasoning = []
    return messages


def _reasoning_parts(item: Item) -> list[Item]:
    parts = item.get("content") or []
    return [{**part, "type": "text"} for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _message(item: Item, field: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise refusal(f"{field}.role", f"`role` must be one of {', '.join(ROLES)}, got {shorten(role)}.")
    return {"role": role, "content": _texts(item.get("content"), f"{field}.content")}


def _add_call(messages: list[dict[str, Any]], item: Item, field: str, *, joins: bool) -> None:
    """Add a call to the previous message of the assistant, or to a new one: in this API calls are separate items."""
    arguments = call_arguments(item.get("arguments"), f"{field}.arguments")
    function = {"name": _string(item, "name", field), "arguments": arguments}
    call = {"id": _string(item, "call_id", field), "type": "function", "function": function}
    if not (joins and messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _unsupported_item(kind: Any, field: str) -> PydanticCustomError:
    return refusal(
        f"{field}.type",
        f"Items of type {shorten(kind)} are not supported. Send messages, function calls and their outputs.",
        "unsupported_parameter",
    )

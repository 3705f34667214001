"""Body of `POST /v1/messages`, and its translation to a chat request.

`conversation` translates the messages, `blocks` their content, `client_tools` the tools that clients run. Shape and
names: Anthropic's Messages API, version 2023-06-01.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, FiniteFloat, PlainValidator, WithJsonSchema, model_validator

from pagemill_api.dialects.anthropic.blocks import MAX_NAMED, TEXTS_SCHEMA, blocks_of, text_of
from pagemill_api.dialects.anthropic.client_tools import function_of
from pagemill_api.dialects.anthropic.conversation import ChatMessages, InputMessage
from pagemill_api.dialects.anthropic.edits import ContextManagement
from pagemill_api.dialects.translation import SamplingExtensions
from pagemill_api.openai.fields import (
    Name,
    RequestModel,
    Text,
    refusal,
)
from pagemill_api.openai.schemas import MAX_MESSAGES, Effort
from pagemill_api.openai.tools import MAX_TOOLS, NAME_PATTERN
from pagemill_api.openai.unsupported import CACHED, NO_USERS, ONE_TIER, Unsupported
from pagemill_protocol.errors import show
from pagemill_protocol.request.sampling import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
_REMOVE = "Remove it."
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BILLING = "x-anthropic-billing-header:"
"""Beginning of a block that Claude Code puts before its own system prompt, for Anthropic's accounts. It is different
for each conversation, so with it no conversation would find the prefix of another one in the cache."""


def _system(value: Any) -> str:
    if isinstance(value, str):
        return value
    texts = [text_of(block, where) for block, where in blocks_of(value, "")]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


class Tool(RequestModel):
    UNSUPPORTED: ClassVar = {
        "allowed_callers": Unsupported("Tools are called by the model directly; remove it.", (["direct"], [])),
        "input_examples": Unsupported("Write the examples into the tool's `description`.", ([],)),
    }
    IGNORED: ClassVar = {
        "cache_control": CACHED,
        "eager_input_streaming": "arguments are always streamed as they are generated",
    }

    name: Annotated[Name, WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False
    type: str = "custom"
    defer_loading: bool = False
    """Whether the prompt has the tool only where the conversation refers to it."""
    max_characters: int | None = Field(None, ge=1)
    """Of an editor: the most characters of a file that it shows."""
    display_width_px: int | None = Field(None, ge=1)
    """Of a computer, like the next two."""
    display_height_px: int | None = Field(None, ge=1)
    enable_zoom: bool = False

    def function(self, field: str) -> dict[str, Any]:
        """Return the function of a chat request."""
        description, schema = self.description, self.input_schema
        if self.type != "custom":
            known = function_of(self.type, self.model_dump())
            if known is None:
                raise refusal(
                    f"{field}.type",
                    f'Tools of type {show(self.type)} run at Anthropic, not here. Send tools of type "custom".',
                    "unsupported_parameter",
                )
            description, schema = description or known[0], schema or known[1]
        function = {"name": self.name, "description": description, "parameters": schema}
        given = {key: value for key, value in function.items() if value is not None}
        return given | ({"strict": True} if self.strict else {})


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
        "compaction": Unsupported("Shorten the messages before sending them."),
        "fallbacks": Unsupported("Send the request to the other model yourself.", ([],)),
        "output_format": Unsupported("Send `output_config.format`."),
        "thread": Unsupported("Nothing is stored; send the whole conversation as `messages`."),
    }
    IGNORED: ClassVar = {
        "billing_policy": "there are no bills",
        "cache_control": CACHED,
        "diagnostics": "it asks why Anthropic's cache was not used; `usage` says how much this one was",
        "fallback_credit_token": "there are no bills",
        "inference_geo": "answers are computed where the model is deployed",
        "service_tier": ONE_TIER,
        "speed": "there is one speed; `priority` orders requests",
        "system[].cache_control": CACHED,
        "system[].citations": "answers cite nothing; documents and search results are text",
        "tools[].display_number": "the client runs the tool and knows its display",
        "user_profile_id": NO_USERS,
        "workspace_id": NO_USERS,
    }

    model_config = ConfigDict(extra="allow")  # to name them

    model: Name
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int
    system: Annotated[str, PlainValidator(_system), WithJsonSchema(TEXTS_SCHEMA)] = ""
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
    context_management: ContextManagement | None = None

    @property
    def unknown_fields(self) -> list[str]:
        """Names of fields that are neither used, refused nor listed as without effect, as far as a header can have
        them."""
        listed = {*self.UNSUPPORTED, *self.IGNORED}
        names = (name for name in self.model_extra or {} if name not in listed and _PLAIN_NAME.fullmatch(name))
        return [*islice(names, MAX_NAMED)]

    def for_chat(self) -> tuple[dict[str, Any], ChatMessages]:
        """Return the body of the equivalent chat completion, and where its messages come from.

        Raises `PydanticCustomError` for refused content.
        """
        if self.context_management is not None:
            self.context_management.check("context_management")
        functions = [tool.function(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        conversation = ChatMessages(self.system, {each["name"]: each for each in functions})
        last_user = max((at for at, each in enumerate(self.messages) if each.role == "user"), default=-1)
        for index, message in enumerate(self.messages):
            conversation.add(message, index, is_passed=index < last_user)
        prefilled = self.messages[-1].role == "assistant"
        body = {
            "model": self.model,
            "messages": conversation.messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tools": [{"type": "function", "function": each} for each in functions],
            "deferred_tools": [tool.name for tool in self.tools if tool.defer_loading],
            "user": self.metadata.user_id if self.metadata is not None else None,
            "continue_final_message": prefilled or None,
            "add_generation_prompt": False if prefilled else None,
            **self.extensions,
            **self._choice(),
            **self._reasoning(),
            **self._output(conversation.effort),
        }
        return {name: value for name, value in body.items() if value is not None}, conversation

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

    def _output(self, turn_effort: str | None) -> dict[str, Any]:
        if self.output_config is None:
            return {"reasoning_effort": turn_effort}
        given: dict[str, Any] = {"reasoning_effort": turn_effort or self.output_config.effort}
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

    @model_validator(mode="after")
    def _edits_by_number(self) -> CountRequest:
        for index, edit in enumerate(self.context_management.edits if self.context_management is not None else ()):
            if edit.needs_count:
                raise refusal(
                    f"context_management.edits[{index}].trigger",
                    "An edit that depends on the number of tokens is not done while tokens are counted. Remove it, or "
                    "send a trigger of type tool_uses.",
                    "unsupported_parameter",
                )
        return self

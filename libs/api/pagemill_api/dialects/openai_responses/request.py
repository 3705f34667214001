"""Body of `POST /v1/responses`, and its translation to a chat request.

`items` makes messages of the input, `tools` functions of the tools. Where a gateway stores responses, the items of the
previous response come first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, FiniteFloat, PlainValidator, ValidationError, WithJsonSchema

from pagemill_api.dialects.openai_responses.conversations import ConversationId
from pagemill_api.dialects.openai_responses.items import INPUT_SCHEMA, Item, ItemMessages, input_items
from pagemill_api.dialects.openai_responses.tools import (
    ResponsesTool,
    ToolFunction,
    flat_name,
    functions_of,
    ignored_tools,
    shown_tool,
)
from pagemill_api.dialects.translation import SamplingExtensions
from pagemill_api.openai.fields import Name, RequestModel, Text, refusal
from pagemill_api.openai.schemas import Effort
from pagemill_api.openai.tools import MAX_TOOLS
from pagemill_api.openai.unknown_fields import left_at
from pagemill_api.openai.unsupported import IGNORED_IN_RESPONSES, NO_MODERATION, Unsupported
from pagemill_protocol.errors import show
from pagemill_protocol.request.sampling import MAX_TOP_LOGPROBS

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


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


_MESSAGE = re.compile(r"\bmessages\[(\d{1,5})\](\.tool_call_id)?")
_TOOL = re.compile(r"\btools\[(\d{1,5})\]\.(?:function\.)?")


class Translation(NamedTuple):
    """A request as a chat, and what is needed to speak of it in the client's terms."""

    chat: dict[str, Any]
    functions: list[ToolFunction]
    messages: ItemMessages
    num_instructions: int
    """The messages before those of the items."""

    def renamed(self, text: str) -> str:
        """Return a text about the chat with the client's names of messages and tools."""

        def message(found: re.Match[str]) -> str:
            index = int(found[1]) - self.num_instructions
            if not 0 <= index < len(self.messages.places):
                return found[0]
            return self.messages.places[index] + (".call_id" if found[2] else "")

        def tool(found: re.Match[str]) -> str:
            index = int(found[1])
            return f"{self.functions[index].place}." if index < len(self.functions) else found[0]

        return _TOOL.sub(tool, _MESSAGE.sub(message, text))


class ItemFields(RequestModel):
    """The fields of a conversation."""

    model: Name
    input: Annotated[list[Item], PlainValidator(input_items), WithJsonSchema(INPUT_SCHEMA)]
    instructions: Text | None = None

    def translated(self, before: Sequence[Item] = ()) -> Translation:
        """Return the equivalent chat, after the items `before`. Raises `PydanticCustomError` for refused content."""
        instructions = [{"role": "developer", "content": self.instructions}] if self.instructions else []
        found = ItemMessages()
        for index, item in enumerate([*before, *self.input], -len(before)):
            found.add(item, f"input[{index}]")
        functions = self._functions(found)
        body = {
            "model": self.model,
            "messages": [*instructions, *found.messages],
            "tools": [{"type": "function", "function": each.function} for each in functions],
            **self._more(),
        }
        chat = {name: value for name, value in body.items() if value is not None}
        return Translation(chat, functions, found, len(instructions))

    @property
    def unread(self) -> list[str]:
        """The names of the client's fields that have no effect on the answer."""
        given = [name for name in self.model_fields_set if getattr(self, name, None) not in (None, [], {})]
        known = type(self).model_fields.keys() | self.UNSUPPORTED.keys()
        return [name for name in given if name in self.IGNORED or name not in known]

    def _functions(self, found: ItemMessages) -> list[ToolFunction]:
        return []

    def _more(self) -> dict[str, Any]:
        """Return the further fields of the chat."""
        return {}


class PromptFields(ItemFields):
    """The fields that make the prompt."""

    tools: list[ResponsesTool] = Field([], max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    reasoning: ReasoningConfig | None = None

    def _functions(self, found: ItemMessages) -> list[ToolFunction]:
        return functions_of(self.tools) + _found_functions(found)

    def _more(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning is not None else None
        return {"tool_choice": self._choice(), "reasoning_effort": effort}

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            left_at("tool_choice", choice, ("type", "mode", "tools"))
            tools = [_named(tool, "tool_choice.tools") for tool in choice["tools"]]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        return _named(choice, "tool_choice")


_NOT_COUNTED = "it adds no token to the prompt"


class InputTokensRequest(PromptFields):
    """Body of `POST /v1/responses/input_tokens`."""

    UNSUPPORTED: ClassVar = {
        name: Unsupported("Send the whole conversation as `input`.")
        for name in ("conversation", "previous_response_id")
    }
    IGNORED: ClassVar = dict.fromkeys(("parallel_tool_calls", "text", "truncation"), _NOT_COUNTED)


class ResponsesRequest(PromptFields, SamplingExtensions):
    model_config = ConfigDict(extra="allow")
    UNSUPPORTED: ClassVar = {
        "prompt": Unsupported("Prompt templates are stored at OpenAI; send `instructions` and `input`."),
        "moderation": Unsupported(NO_MODERATION),
        "context_management": Unsupported(
            'Compact the input with POST /v1/responses/compact when it is long, or send `truncation: "auto"`.', ([],)
        ),
    }
    IGNORED: ClassVar = IGNORED_IN_RESPONSES

    max_output_tokens: int | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: int | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    stream: bool = False
    background: bool = False
    """Whether the answer is generated without the client, which reads it by its id."""
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    store: bool = True
    previous_response_id: Name | None = None
    conversation: ConversationId | None = None
    include: list[str] = Field([], max_length=16)
    """Parts to add to a response. Those of tools that run at OpenAI do not exist here."""
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    """Above 0, the answer has log probabilities also if `include` does not name them."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto`: a conversation that is longer than the model's context loses its oldest items."""
    max_tool_calls: int | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    def _more(self) -> dict[str, Any]:
        return {
            **super()._more(),
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "user": self.user,
            "logprobs": LOGPROBS in self.include or self.top_logprobs > 0,
            "top_logprobs": self.top_logprobs,
            **{name: getattr(self, name) for name in _SAMPLING},
            **self.extensions,
            **self._text(),
        }

    def shown(self, *, stored: bool = False) -> dict[str, Any]:
        """Return the fields of the request that a response repeats."""
        left_out = {
            "input",
            "model",
            "stream",
            "tools",
            "include",
            *_SAMPLING,
            *self.extensions,
            *(self.model_extra or {}),
        }
        given = self.model_dump(by_alias=True, mode="json", exclude=left_out)
        text = given["text"] or {}
        given["text"] = {**text, "format": text.get("format") or {"type": "text"}}
        given["metadata"] = given["metadata"] or {}
        given["store"] = stored
        given["conversation"] = None if self.conversation is None else {"id": self.conversation}
        given["tools"] = [shown_tool(tool) for tool in self.tools]
        return given

    @property
    def ignored_tools(self) -> dict[str, str]:
        return ignored_tools(self.tools)

    @property
    def unread(self) -> list[str]:
        names = super().unread
        if not {ENCRYPTED_REASONING, LOGPROBS}.issuperset(self.include):
            names.append("include")
        if self.reasoning is not None and self.reasoning.summary is not None:
            names.append("reasoning.summary")
        return names

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


_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
"""Fields of chat completions with the same names, which responses repeat as they act, or not at all."""


def _named(choice: Any, place: str) -> Any:
    """Return the choice of a client's tool as that of a function; anything else as it is. `place`: its path."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom", "local_shell"):
        return choice
    left_at(place, choice, ("type", "name", "namespace"))
    name, namespace = choice.get("name", choice["type"]), choice.get("namespace") or ""
    named = flat_name(name, namespace) if isinstance(name, str) and isinstance(namespace, str) else name
    return {"type": "function", "function": {"name": named}}


def _found_functions(found: ItemMessages) -> list[ToolFunction]:
    """Return the functions of the tools that the client's own search returned."""
    functions: list[ToolFunction] = []
    for place, tools in found.found_tools:
        for index, tool in enumerate(tools):
            at = f"{place}[{index}]"
            try:
                parsed = ResponsesTool.model_validate(tool)
            except ValidationError:
                raise refusal(at, f"`{at}` must be a tool, as in `tools`, got {show(tool)}.") from None
            functions += [each._replace(place=at) for each in functions_of([parsed])]
    return list({each.name: each for each in functions}.values())

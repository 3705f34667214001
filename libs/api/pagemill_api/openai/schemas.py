"""Bounded request types of the OpenAI dialects, with vLLM's extra sampling fields.

They check shape and size; `SamplingParams.validate` checks ranges of sampling values, `prepare` the context length and
token ids. Unknown fields are ignored, known but unsupported ones refused (`unsupported`). Parse with
`parse.parse_body`, which reports errors in OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, model_validator
from pydantic_core import PydanticCustomError

from pagemill_api.openai import unsupported
from pagemill_api.openai.fields import (
    ContentText,
    EarlyStopping,
    LogitBias,
    Name,
    Prompts,
    RequestId,
    RequestModel,
    StopList,
    TemplateKwargs,
    Text,
    TokenIds,
    refusal,
)
from pagemill_api.openai.form_fields import FormFields
from pagemill_api.openai.tools import ToolCalls, ToolChoice, Tools, choice_error
from pagemill_api.structural_tags import Format
from pagemill_protocol.errors import show
from pagemill_protocol.request.sampling import (
    INT32_MAX,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
    stream_conflict,
)

MAX_MESSAGES = 2048
MAX_TOTAL_CHOICES = 2048
"""Maximum number of choices of all prompts of one completions request together."""
DEFAULT_COMPLETION_TOKENS = 16

Role = Literal["system", "developer", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenBudget = Annotated[int, Field(ge=-1, le=INT32_MAX)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With `include_usage`: every chunk has the usage so far, with the completion tokens of its own choice."""


class PredictedAnswer(RequestModel):
    type: Literal["content"]
    content: ContentText
    """Text that the answer probably repeats. It is proposed, and changes no answer."""


class ChatMessage(RequestModel):
    UNSUPPORTED: ClassVar = unsupported.MESSAGE

    role: Role
    content: ContentText = ""
    """Text; text parts of a list are joined by line breaks."""
    name: Name | None = None
    tool_calls: ToolCalls = Field(default_factory=list)
    """The calls of an assistant message."""
    tool_call_id: Name | None = None
    """The call that a tool message answers."""
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """Another name of `reasoning_content`."""

    @model_validator(mode="after")
    def _fits_role(self) -> ChatMessage:
        if self.role == "tool" and self.tool_call_id is None:
            raise refusal("tool_call_id", "A message of role tool needs `tool_call_id`. Send the id of the call.")
        if self.role != "assistant" and self.tool_calls:
            raise refusal("tool_calls", f"A message of role {self.role} has no `tool_calls`. Send it as assistant.")
        return self

    @model_validator(mode="after")
    def _needs_content(self) -> ChatMessage:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise refusal("content", "`content` is missing. Send a string or a list of text parts.")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates; `developer` is OpenAI's newer name of `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        given = {
            "name": self.name,
            "tool_calls": self.tool_calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return message | {key: value for key, value in given.items() if value is not None}


class SamplingFields(RequestModel, FormFields):
    """The fields of both dialects about sampling and streaming."""

    model: Name
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    use_beam_search: bool = False
    beam_width: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Another name of `best_of`, with `use_beam_search` only."""
    length_penalty: FiniteFloat = 1.0
    early_stopping: EarlyStopping = False
    temperature: FiniteFloat = 1.0
    top_p: FiniteFloat = 1.0
    top_k: int = 0
    min_p: FiniteFloat = 0.0
    seed: int | None = None
    presence_penalty: FiniteFloat = 0.0
    frequency_penalty: FiniteFloat = 0.0
    repetition_penalty: FiniteFloat = 1.0
    logit_bias: LogitBias | None = None
    stop: StopList = Field([], max_length=MAX_STOP_STRINGS)
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Maximum tokens of the prompt, of which the last are kept; -1: as many as fit beside `max_tokens`."""
    logprob_token_ids: list[int] = Field([], max_length=MAX_LOGPROB_TOKEN_IDS)
    """With `logprobs`: report these tokens in place of the most likely ones."""
    bad_words: list[str] = Field([], max_length=MAX_BAD_WORDS)
    allowed_token_ids: list[int] = Field([], max_length=MAX_ALLOWED_TOKEN_IDS)
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    request_id: RequestId | None = None
    """vLLM's field: the answer's `id` is made from it."""
    user: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "`stream_options` is only allowed with `stream: true`.")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> SamplingFields:
        if self.beam_width is not None:
            if not self.use_beam_search:
                raise refusal("beam_width", f"`beam_width` ({self.beam_width}) needs `use_beam_search: true`.")
            if self.best_of not in (None, self.beam_width):
                raise refusal(
                    "beam_width",
                    f"`beam_width` ({self.beam_width}) and `best_of` ({self.best_of}) mean the same here. Send one.",
                )
        name = "best_of" if self.beam_width is None else "beam_width"
        if self.num_sequences < self.n:
            raise refusal(
                name, f"`{name}` ({self.num_sequences}) must be at least `n` ({self.n}). Raise `{name}` or lower `n`."
            )
        conflict = stream_conflict(use_beam_search=self.use_beam_search, num_sequences=self.num_sequences, n=self.n)
        if self.stream and conflict is not None:
            raise refusal("stream", conflict)
        return self

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated for each prompt."""
        return self.beam_width or self.best_of or self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatTemplateFields(RequestModel):
    """Fields about rendering messages as a prompt, shared by chat and tokenize."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    tools: Tools = Field(default_factory=list)

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return self.tools

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """Those of them that the chat template gets."""
        return self.prompt_tools

    @property
    def may_move_system(self) -> bool:
        """Whether system messages within the conversation may become the user's, for templates that refuse them."""
        return False

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs


class ReasoningFields(RequestModel):
    effort: Effort | None = None
    max_tokens: TokenBudget | None = None


class ChatCompletionRequest(SamplingFields, ChatTemplateFields):
    """Body of `POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar = unsupported.CHAT
    IGNORED: ClassVar = unsupported.IGNORED_IN_CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = False
    """False, since templates write the special tokens themselves."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    """A variable of the chat template; "none" also sets `enable_thinking` and `thinking` to false."""
    thinking_token_budget: TokenBudget | None = None
    """Maximum tokens of reasoning; -1: no limit."""
    reasoning: ReasoningFields | None = None
    """`reasoning_effort` and `thinking_token_budget` in one object."""
    include_reasoning: bool = True
    """If false, reasoning is parsed and left out of the answer."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template."""
    prediction: PredictedAnswer | None = None
    """What the answer probably repeats, as for an edited file."""

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call: with `allowed_tools` only those, so that neither prompt nor grammar has
        others."""
        if isinstance(self.tool_choice, dict) and "names" in self.tool_choice:
            return [tool for tool in self.tools if tool["function"]["name"] in self.tool_choice["names"]]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def names_function(self) -> str:
        """The function that the model must call; "" if the client named none."""
        choice = self.tool_choice
        return str(choice["function"]["name"]) if isinstance(choice, dict) and "function" in choice else ""

    @property
    def reasoning_budget(self) -> int | None:
        given = self.thinking_token_budget
        if given is None and self.reasoning is not None:
            given = self.reasoning.max_tokens
        return None if given == -1 else given

    @property
    def forces_calls(self) -> bool:
        mode = self.tool_choice.get("mode") if isinstance(self.tool_choice, dict) else self.tool_choice
        return mode == "required" or bool(self.names_function)

    @property
    def call_forms(self) -> Mapping[str, Format]:
        """Forms of arguments by function, written in JSON, beside those that follow from schemas."""
        return {}

    @property
    def keeps_logprobs(self) -> bool:
        """Whether the end of a stream repeats its log probabilities."""
        return False

    @property
    def constrains_calls(self) -> bool:
        """Whether calls are constrained to the schema of their function."""
        return self.forces_calls or any(tool["function"].get("strict") for tool in self.prompt_tools)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template; `chat_template_kwargs` overrides the fields of the request."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning is not None else None)
        given: dict[str, Any] = {"reasoning_effort": effort, "verbosity": self.verbosity}
        if effort == "none":
            given |= {"enable_thinking": False, "thinking": False}
        return {name: value for name, value in given.items() if value is not None} | self.chat_template_kwargs

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "`top_logprobs` is only allowed with `logprobs: true`.")
        errors = (
            _alternatives_error(self, wants_logprobs=self.logprobs),
            _continuation_error(self, self.messages),
            choice_error(self.tool_choice, self.tools),
            _history_error(self.messages),
            _reasoning_error(self),
            _beam_search_error(self),
        )
        for error in errors:
            if error is not None:
                raise error
        return self

    @property
    def max_tokens_field(self) -> str:
        """The name of the field that limits the answer; the newer name is used when both are sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    UNSUPPORTED: ClassVar = unsupported.COMPLETIONS
    IGNORED: ClassVar = unsupported.IGNORED_IN_COMPLETIONS

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: Text = ""
    """The text after the answer: the model fills in the middle, if it has tokens for that."""
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompt_only(self) -> bool:
        """Whether the client asks only for the prompt, usually for its log probabilities."""
        return self.echo and self.max_tokens == 0

    @property
    def requested_tokens(self) -> int | None:
        """Tokens to generate: an engine generates at least one."""
        return 1 if self.prompt_only else self.max_tokens

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        error = _alternatives_error(self, wants_logprobs=self.logprobs is not None)
        if error is not None:
            raise error
        if self.suffix and (self.echo or not all(isinstance(each, str) for each in self.prompt)):
            other = "echo" if self.echo else "prompt"
            raise refusal(other, f"With `suffix`, `prompt` must be text and `echo` false. Change `{other}`.")
        if len(self.prompt) * self.num_sequences > MAX_TOTAL_CHOICES:
            name = "n" if self.num_sequences == self.n else "best_of" if self.beam_width is None else "beam_width"
            raise refusal(
                name,
                f"{len(self.prompt)} prompts with {name}={self.num_sequences} make "
                f"{len(self.prompt) * self.num_sequences} choices; at most {MAX_TOTAL_CHOICES} are allowed in one "
                "request.",
            )
        return self


class TokenizeRequest(ChatTemplateFields):
    """Body of `POST /tokenize`: a prompt, or messages to render first."""

    UNSUPPORTED: ClassVar = {
        name: unsupported.CHAT[name] for name in ("chat_template", "mm_processor_kwargs", "documents")
    }

    model: str = Field("", max_length=512)
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    """`None`: true for a prompt, false for messages."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "Send either `prompt` or `messages`.")
        if self.messages is None:
            for name in self.model_fields_set & ChatTemplateFields.model_fields.keys():
                raise refusal(name, f"`{name}` concerns `messages`, and a `prompt` is not rendered. Remove it.")
        for error in (
            ()
            if self.messages is None
            else (
                _continuation_error(self, self.messages),
                _history_error(self.messages),
            )
        ):
            if error is not None:
                raise error
        return self

    @property
    def num_chars(self) -> int:
        """Number of characters to tokenize, before messages are rendered."""
        return len(self.prompt or "") + sum(len(message.content) for message in self.messages or [])


class DetokenizeRequest(RequestModel):
    """Body of `POST /detokenize`."""

    model: str = Field("", max_length=512)
    tokens: TokenIds


class LoadAdapterRequest(RequestModel):
    """Body of `POST /v1/load_lora_adapter`, with vLLM's names."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    """Whether it may replace one of the same name."""


class UnloadAdapterRequest(RequestModel):
    """Body of `POST /v1/unload_lora_adapter`, with vLLM's names."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None
    """Accepted and not used: names are enough."""


def _beam_search_error(request: ChatCompletionRequest) -> PydanticCustomError | None:
    if not request.use_beam_search or not (request.constrains_calls or request.reasoning_budget is not None):
        return None
    message = "Forced and strict tool calls and reasoning budgets do not work with `use_beam_search`. Remove it."
    return refusal("use_beam_search", message)


def _reasoning_error(request: ChatCompletionRequest) -> PydanticCustomError | None:
    given = request.reasoning or ReasoningFields()
    for name, value, other in (
        ("effort", given.effort, "reasoning_effort"),
        ("max_tokens", given.max_tokens, "thinking_token_budget"),
    ):
        if value is not None and getattr(request, other) not in (None, value):
            return refusal(f"reasoning.{name}", f"`reasoning.{name}` and `{other}` differ. Send one of them.")
    return None


def _alternatives_error(request: SamplingFields, *, wants_logprobs: bool) -> PydanticCustomError | None:
    if not request.logprob_token_ids or wants_logprobs:
        return None
    return refusal("logprob_token_ids", "`logprob_token_ids` needs `logprobs`. Send `logprobs`, or remove it.")


def _continuation_error(request: ChatTemplateFields, messages: list[ChatMessage]) -> PydanticCustomError | None:
    if not request.continue_final_message:
        return None
    if "add_generation_prompt" in request.model_fields_set and request.add_generation_prompt:
        return refusal(
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` exclude each other. Send only one of them as true.",
        )
    if messages[-1].role != "assistant":
        return refusal(
            "continue_final_message",
            f"`continue_final_message` needs a last message of role assistant, got {messages[-1].role}.",
        )
    return None


def _history_error(messages: list[ChatMessage]) -> PydanticCustomError | None:
    """Return the error of the first tool message that answers no earlier call, or None."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call["id"] for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in known:
            return refusal(
                f"messages[{index}].tool_call_id",
                f"No assistant message before it has a call with the id {show(message.tool_call_id)}. Send the "
                "assistant's `tool_calls` too, before the results.",
            )
    return None

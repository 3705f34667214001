"""The format of a chat, from the request and the model's template: messages to render, and parsers of the answer.

The template's own rendering of tools is used where its format is known, else `answers.tool_prompt`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.registry import (
    AUTO,
    HARMONY,
    HERMES,
    MARKERS,
    NONE,
    call_syntax,
    detect_reasoning,
    detect_tools,
    hides_markers,
)
from pagemill_api.answers.tool_prompt import with_tool_prompt
from pagemill_api.grammars.schemas.reading import text_properties
from pagemill_api.openai.call_ids import with_template_ids
from pagemill_api.openai.schemas import ChatCompletionRequest, ChatTemplateFields, TokenizeRequest
from pagemill_protocol.errors import PagemillError, invalid_field, show, unavailable
from pagemill_protocol.request.answer_format import AnswerFormat, ParserSettings
from pagemill_protocol.source_errors import SourceError

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_MENTIONS_TOOLS = re.compile(r"\btools\b")


class ChatFormat(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    """Tools to pass to the template."""
    answer: AnswerFormat | None
    syntax: CallSyntax | None = None
    """The model's syntax of calls; `None`: not declared."""
    reasoning: str = ""
    """Name of the parser of the model's reasoning."""

    def answer_format_after(self, prompt: str) -> AnswerFormat | None:
        """Return the answer format for the rendered `prompt`."""
        if self.answer is None or self.answer.reasoning not in MARKERS:
            return self.answer
        begin, _ = MARKERS[self.answer.reasoning]
        if not prompt.rstrip().endswith(begin):
            return self.answer
        return msgspec.structs.replace(self.answer, starts_in_reasoning=True)

    @property
    def hides_markers(self) -> bool:
        """Whether the format's markers are special tokens, which answers leave out unless they are asked for."""
        return self.answer is not None and hides_markers(self.answer)


def chat_format(
    req: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer, parsers: ParserSettings
) -> ChatFormat:
    """Return the format. Raises `PagemillError` 400 for tools where the deployment parses none."""
    messages = [message.for_template() for message in req.messages or ()]
    are_text, controls = parsers.control_tokens == "text", tokenizer.control_tokens
    if are_text:
        messages = controls.shielded_messages(messages)
    callable_tools, tools = req.prompt_tools, req.template_tools or None
    template = tokenizer.chat_template.source(has_tools=bool(tools))
    try:
        tool_format = detect_tools(template, parsers.tools)
        reasoning = detect_reasoning(template, parsers.reasoning)
    except SourceError as error:
        raise unavailable(f"The model's answers cannot be parsed: {error}", code="model_not_ready") from error
    messages = with_template_ids(messages, template, tool_format)
    if tools and are_text:
        tools = controls.shielded(tools)
    if callable_tools and parsers.tools == NONE:
        raise PagemillError(
            "`tools` is not supported: `model.toolCallParser` of this model is none. Remove it, or have it set.",
            param="tools",
            code="unsupported_parameter",
        )
    if template and (tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages)):
        reason = _lacking(template, tool_format)
        if reason is not None:
            tool_format = parsers.tools if parsers.tools not in (AUTO, NONE) else HERMES
            messages = _with_default_tools(messages, tools or [], template, tool_format, reason)
            tools = None
    if isinstance(req, ChatCompletionRequest) and req.reasoning_budget is not None and not reasoning:
        raise invalid_field(
            "thinking_token_budget",
            "`thinking_token_budget` needs a model whose reasoning is parsed; `model.reasoningParser` of this model "
            "is none, or detected none in its chat template. Remove it, or have the parser set.",
        )
    used = tool_format if callable_tools else ""
    reasoning = HARMONY if used == HARMONY else reasoning
    syntax = call_syntax(HARMONY if reasoning == HARMONY else used, template)
    return ChatFormat(messages, tools, _answer_format(req, used, reasoning), syntax, reasoning)


def without_later_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for templates that take system messages only at the beginning: others become part of the user's
    message before them, or a user's message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and found:
            message = {**message, "role": "user"}
        if found and message["role"] == found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found


def _answer_format(req: ChatTemplateFields, tools: str, reasoning: str) -> AnswerFormat | None:
    if not isinstance(req, ChatCompletionRequest) or not (tools or reasoning):
        return None
    return AnswerFormat(
        tools=tools,
        reasoning=reasoning,
        shows_reasoning=req.include_reasoning,
        reasoning_budget=req.reasoning_budget,
        parallel=req.parallel_tool_calls,
        forced=req.forces_calls,
        named=bool(req.names_function),
        string_parameters=_string_parameters(req.prompt_tools) if tools == "qwen3-coder" else {},
    )


def _lacking(template: str, tool_format: str) -> str | None:
    """Return why the template's own rendering of tools cannot be used, or None."""
    if not _MENTIONS_TOOLS.search(template):
        return "renders no tools"
    return None if tool_format else "uses a format of calls that no parser supports"


def _with_default_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str, tool_format: str, reason: str
) -> list[dict[str, Any]]:
    syntax = call_syntax(tool_format, template)
    if syntax is None:
        raise PagemillError(
            f"`tools` is not supported: the chat template of this model {reason}, and its parser {show(tool_format)} "
            "declares no syntax to describe calls in. Remove it, or have `model.toolCallParser` set to another one.",
            param="tools",
            code="unsupported_parameter",
        )
    _log_default(template, tool_format, reason)
    return with_tool_prompt(messages, tools, template, syntax)


@lru_cache(maxsize=64)
def _log_default(template: str, tool_format: str, reason: str) -> None:
    """Log the default once for each template."""
    logger.warning(
        "The chat template %s: tools are described in the system message in the format %r. "
        "Set model.chatTemplate or model.toolCallParser where the model was trained on another one. Template: %.60r",
        reason,
        tool_format,
        template,
    )


def _string_parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for tool in tools:
        if names := text_properties(tool["function"].get("parameters") or {}):
            found[tool["function"]["name"]] = names
    return found

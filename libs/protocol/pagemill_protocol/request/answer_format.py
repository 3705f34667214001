"""How an engine parses the answer of one request: part of `GenerateRequest`. The parsers are `pagemill_api.answers`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

ControlTokenMode = Literal["text", "tokens"]
"""What control tokens in the texts of chats are."""
HostedToolMode = Literal["ignore", "refuse"]
"""What is done with tools that do not run here: they are left out and named, or refused."""


class ParserSettings(NamedTuple):
    """The settings of a deployment: names of parsers, `auto` (detect from the chat template) or `none`."""

    tools: str = "auto"
    reasoning: str = "auto"
    control_tokens: ControlTokenMode = "text"
    """What control tokens in the texts of chats are: `text`, or the `tokens` themselves."""
    hosted_tools: HostedToolMode = "ignore"
    """What is done with tools that run at the API's own company, such as a search of the web."""


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to parse one request's answer."""

    tools: str = ""
    """Name of the parser of tool calls; empty: the request has no tools."""
    reasoning: str = ""
    """Name of the parser of reasoning; empty: reasoning is not separated from text."""
    starts_in_reasoning: bool = False
    """The prompt ends with the marker that opens the reasoning."""
    shows_reasoning: bool = True
    reasoning_budget: int | None = None
    """Maximum tokens between the markers; the engine then forces the end marker. `None`: no limit."""
    parallel: bool = True
    """If false, the client gets the first call only."""
    forced: bool = False
    """The answer must be calls after optional reasoning, so what is left of an incomplete call is no text."""
    named: bool = False
    """The client named the function to call: the answer then ends with `stop`, as in OpenAI's API."""
    string_parameters: dict[str, list[str]] = {}
    """For each tool, the parameters whose values are text, for formats that do not quote text."""
